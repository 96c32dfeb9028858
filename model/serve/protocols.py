"""The protocols: the paths of each, and what reads their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from urdir.model.serve.anthropic import count_tokens, read_message
from urdir.model.serve.asked import Asked, Follows
from urdir.model.serve.chats import read_chat
from urdir.model.serve.completions import read_completion
from urdir.model.serve.embeddings import (
    Embeds,
    read_embeddings,
    read_native_embeddings,
    read_ollama_embed,
    read_ollama_embedding,
    read_rerank,
    read_score,
)
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.llama_server import apply_template, read_infill, read_native
from urdir.model.serve.ollama import read_generate, read_ollama_chat
from urdir.model.serve.ollama_model import running, show, tags, version
from urdir.model.serve.responses import read_response
from urdir.model.serve.tokens import detokenize, tokenize

#: Paths that answer a POST with what the model writes.
ANSWERED: Mapping[str, Callable[[Fields, ServedModel, Limits], Asked | Follows | Json]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/messages": read_message,
    "/v1/responses": read_response,
    "/completion": read_native,
    "/completions": read_native,
    "/infill": read_infill,
    "/api/chat": read_ollama_chat,
    "/api/generate": read_generate,
}
#: Paths that answer a POST with the number of tokens that the model would read.
COUNTED: Mapping[str, Callable[[Fields, ServedModel, Limits], Asked | Follows]] = {
    "/v1/chat/completions/input_tokens": read_chat,
    "/v1/responses/input_tokens": read_response,
}
#: Paths that answer a POST with embeddings or scores.
EMBEDDED: Mapping[str, Callable[[Fields, ServedModel, Limits], Embeds]] = {
    "/v1/embeddings": read_embeddings,
    "/embedding": read_native_embeddings,
    "/embeddings": read_native_embeddings,
    "/v1/rerank": read_rerank,
    "/v2/rerank": read_rerank,
    "/rerank": read_rerank,
    "/v1/reranking": read_rerank,
    "/reranking": read_rerank,
    "/v1/score": read_score,
    "/score": read_score,
    "/api/embed": read_ollama_embed,
    "/api/embeddings": read_ollama_embedding,
}
#: Paths that answer a POST without the model.
JOBS: Mapping[str, Callable[[Fields, ServedModel, Limits], Json]] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/messages/count_tokens": count_tokens,
    "/apply-template": apply_template,
    "/api/show": show,
}
#: Paths that answer a GET with facts of the model.
FIXED: Mapping[str, Callable[[ServedModel], Json]] = {
    "/api/version": version,
    "/api/tags": tags,
    "/api/ps": running,
}
