"""An HTTP server that speaks OpenAI's API, around one engine. See docs/server.md; `hybrid-moe serve` is its command.

    from hybrid_moe_ext.server.app import create_app
    create_app(Engine("DeepSeek-V3/"), ServerOptions(name="deepseek-v3"))    # an ASGI application

Reading order: app (routes), guard (what stands before them), schema, translate, serving, answers, run (uvicorn, SIGTERM).
"""

from importlib.util import find_spec

from ..errors import OptionError
from .options import ServerOptions

__all__ = ["ServerOptions", "require_packages"]


def require_packages() -> None:
    """Raises OptionError when what only the server needs is not installed."""
    missing = [
        name for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2") if find_spec(name) is None
    ]
    if missing:
        raise OptionError(
            f"the server needs packages that are not installed ({', '.join(missing)}): pip install 'hybrid-moe-ext[server]'"
        )
