"""Graphs that lack an edge, to see that it is missed."""

from __future__ import annotations

from urdir.driver.device import Device
from urdir.driver.execute import bind
from urdir.driver.graph import Graph
from urdir.driver.plan import Plan


def graph_without(plan: Plan, device: Device, missing: tuple[int, int]) -> Graph:
    """The graph of a plan without the edge between two operations, which it needs: the second waits
    for what the first waits for."""
    bound, graph = bind(plan, device), Graph(device, "planted")
    waits: list[list[int]] = [[] for _ in range(len(plan))]
    edges = plan.edges()
    for edge in edges:
        waits[edge.after].append(edge.before)
    first, second = missing
    waits[second].remove(first)
    waits[second] += set(waits[first]).difference(waits[second])
    for (operation, loaded), before in zip(bound.steps(), waits, strict=True):
        graph.add(operation, loaded, before)
    return graph
