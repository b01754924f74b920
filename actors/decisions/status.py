"""The status document: the fold of the log, in the shape that clients read."""

from __future__ import annotations

from typing import Any

from kvalet.actors.decisions.state import (
    HOLDING,
    PARKED,
    QUEUED,
    House,
    Lease,
)
from kvalet.protocol.ids import Nanos

NANOS = 1_000_000_000


def status(house: House, now_ns: Nanos) -> dict[str, Any]:
    """Everything an operator may ask, as plain values. Ages are seconds, sizes cells."""
    server, totals = house.server, house.totals
    live = [lease for lease in house.leases.values() if lease.state != QUEUED]
    return {
        "mode": _mode(house),
        "park_method": house.method,
        "policy": house.settings.policy,
        "exact_concurrency": server.exact,
        "server": {
            "state": server.state,
            "pid": server.pid,
            "generation": server.generation,
            "build": server.build,
            "url": server.url,
            "model": server.model,
            "slots": house.slots,
            "n_ctx": house.cells,
            "native_ctx": server.native_ctx or None,
            "max_ctx": server.max_ctx or None,
            "reason": server.reason,
            "cause": server.cause,
            "gave_up": list(server.given),
            "memory": [
                {"name": one.name, "planned": one.planned, "reported": one.reported}
                for one in server.memory
            ],
        },
        "pool": _pool(house),
        "leases": [_lease(lease, now_ns) for lease in live],
        "queue": [
            {
                "request": request,
                "position": position,
                "waiting_s": _seconds(now_ns - house.leases[request].since_ns),
            }
            for position, request in enumerate(house.queue, 1)
        ],
        "speculative": {
            "requested": ",".join(server.drafting_asked) or "off",
            "effective": ",".join(server.drafting) or "off",
            "fallback_reason": "runtime_error" if "no-drafter" in server.given else None,
        },
        "totals": {
            "requests": totals.requests,
            "finished": totals.finished,
            "failed": totals.failed,
            "left": totals.left,
            "refused": totals.refused,
            "parks": totals.parks,
            "resumes": totals.resumes,
            "recomputes": totals.recomputes,
            "restarts": totals.restarts,
        },
        "warnings": [{"code": code, "message": message} for code, message in server.warnings],
    }


def _mode(house: House) -> str:
    if house.handed_over:
        return "server"
    return "proxy" if house.settings.preempt else "off"


def _pool(house: House) -> dict[str, int]:
    leases = list(house.leases.values())
    return {
        "cells": house.cells,
        "granted": house.granted_total,
        "resident": sum(
            lease.cells for lease in leases if lease.state in HOLDING and not lease.away
        ),
        "parked": sum(lease.cells for lease in leases if lease.gone_since is not None),
        "idle": house.residue_total,
        "headroom": house.headroom,
        "saved_bytes": house.saved_bytes,
    }


def _lease(lease: Lease, now_ns: Nanos) -> dict[str, Any]:
    parked_ns = lease.parked_ns
    if lease.gone_since is not None:
        parked_ns = Nanos(parked_ns + now_ns - lease.gone_since)
    return {
        "lease": lease.lease,
        "request": lease.request,
        "surface": lease.surface,
        "state": PARKED if lease.away else lease.state,
        "slots": list(lease.slots),
        "prompt": lease.prompt,
        "generated": lease.generated,
        "cap": lease.cap,
        "granted": lease.granted,
        "parks": lease.parks,
        "resumes": lease.resumes,
        "recomputes": lease.recomputes,
        "age_s": _seconds(now_ns - lease.arrived_ns),
        "parked_s": _seconds(parked_ns),
    }


def _seconds(span_ns: int) -> float:
    return round(span_ns / NANOS, 3)
