"""The web page: the answers of the API for people, rendered on the server."""

from fastapi import APIRouter

from autofit.api.page import calculator, entrance, frontier, hardware, point, searches

ROUTES = APIRouter(include_in_schema=False)
for group in (frontier, hardware, point, calculator, searches, entrance):
    ROUTES.include_router(group.ROUTES)

__all__ = ["ROUTES"]
