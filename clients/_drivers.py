"""Carries out the steps `CallRules` asks for, with httpx, synchronously and asynchronously."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import httpx

from windlass.clients._rules import CloseResponse, ReadBody, SendRequest, Sleep, Step, Steps

T = TypeVar("T")


def run(http: httpx.Client, steps: Steps[T]) -> T:
    """Carry the steps out one after the other; the generator is told of a failure of httpx and decides."""
    result: Any = None
    error: httpx.HTTPError | None = None
    while True:
        try:
            step = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        result = error = None
        try:
            result = _perform(http, step)
        except httpx.HTTPError as failed:
            error = failed


def _perform(http: httpx.Client, step: Step) -> Any:
    match step:
        case SendRequest(request):
            return http.send(request, stream=True, follow_redirects=False)
        case ReadBody(response):
            try:
                return response.read()
            finally:
                response.close()
        case CloseResponse(response):
            return response.close()
        case Sleep(seconds):
            return time.sleep(seconds)


async def run_async(http: httpx.AsyncClient, steps: Steps[T]) -> T:
    """`run` for an asynchronous client."""
    result: Any = None
    error: httpx.HTTPError | None = None
    while True:
        try:
            step = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        result = error = None
        try:
            result = await _perform_async(http, step)
        except httpx.HTTPError as failed:
            error = failed


async def _perform_async(http: httpx.AsyncClient, step: Step) -> Any:
    match step:
        case SendRequest(request):
            return await http.send(request, stream=True, follow_redirects=False)
        case ReadBody(response):
            try:
                return await response.aread()
            finally:
                await response.aclose()
        case CloseResponse(response):
            return await response.aclose()
        case Sleep(seconds):
            import anyio  # httpx brings it

            return await anyio.sleep(seconds)
