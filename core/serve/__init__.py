"""The server: OpenAI's endpoints over one engine. It needs the extra `mambaslots[serve]`.

A request goes through them in this order:

server, server_settings, connections
                                     the process; clients that half-close, processes out of descriptors
app, middleware, api_keys            endpoints; around each: a key, the header Host, an id, a log line
service                              admits requests, within the server's limits
jobs, requests                       a body's bytes become a job; a body as a model, which checks each field
generated_answer, served_engine      an answer that is generated and sent; an engine as the server sees it
answer_text, answer_json             an answer's text and tokens; both as OpenAI's JSON, whole and in chunks
error_answers, prometheus_text       the errors that clients see; what Prometheus reads
"""

from typing import TYPE_CHECKING

from ..lazy_names import importer
from .server_settings import ServerSettings

if TYPE_CHECKING:
    from .app import make_app
    from .server import serve

__all__ = ["ServerSettings", "make_app", "serve"]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = importer(
        globals(), "the server needs FastAPI, uvicorn and prometheus_client: pip install 'mambaslots[serve]'"
    )
