"""GET /v1/models and /v1/models/{id}: the one model there is."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response

from services.router.http.frontend import Frontend
from services.router.http.json_response import json_response
from shared.base.errors import Unavailable


class Models:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._created_s = int(time.time())

    async def index(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def show(self, http: Request) -> Response:
        self._frontend.check_model(http.path_params["model_id"])
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._frontend.settings.model_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "twostroke",
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        """None while no worker says."""
        try:
            return self._frontend.backend.max_model_len(self._frontend.settings.model_name)
        except Unavailable:
            return None
