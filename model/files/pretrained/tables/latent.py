"""TODO."""

from __future__ import annotations

from collections.abc import Mapping

from urdir.model.files.pretrained.family import Family

FAMILIES: Mapping[str, Family] = {}
