"""GET /v1/models and /v1/models/{id}: what can be served now."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from services.router.http.catalog import ServedModel
from services.router.http.frontend import Frontend
from services.router.http.json_response import json_response
from shared.base.errors import Unavailable


class Models:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def index(self, http: Request) -> Response:
        cards = [_card(model, pool.max_model_len) for model, pool in self._frontend.catalog.served()]
        return json_response({"object": "list", "data": cards})

    async def show(self, http: Request) -> Response:
        model = self._frontend.catalog.find(http.path_params["model_id"])
        return json_response(_card(model, self._max_model_len(model.name)))

    def _max_model_len(self, model: str) -> int | None:
        """None while no worker says."""
        try:
            return self._frontend.backend.max_model_len(model)
        except Unavailable:
            return None


def _card(model: ServedModel, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "twostroke",
        "max_model_len": max_model_len,
    }
