"""What is said of rotary scalings: the report of an answer, what became of its context, a model's groups and its ladder.

Knows what a sample ran under and nothing of how that was chosen, or of how answers are sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from windlass.engine.interface.context import ContextReport, ContextRule
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.rotary.auto_scaling import AutoScalingThresholds
from windlass.engine.rotary.rope_scaling import RotaryGroup, main_group, original_len
from windlass.engine.rotary.rotary_policy import RotaryReport, make_auto_plan
from windlass.server.generation.deltas import SampleReport


def sample_object(report: SampleReport, dropped_turns: int | None) -> dict[str, Any]:
    """The `rotary` field of an answer. dropped_turns: None where none may be."""
    context = context_object(report.context, report.rule)
    if dropped_turns is not None:
        context = {**(context or {}), "dropped_turns": dropped_turns}
    return rotary_object(report.rotary, context)


def rotary_object(report: RotaryReport, context: dict[str, int] | None) -> dict[str, Any]:
    """A scaling as answers show it, with what became of the context, where anything did."""
    shown: dict[str, Any] = {
        "rope_type": report.rope_type,
        "parameters": report.parameters,
        "policy": report.policy,
        "effective_length": report.effective_length,
        "fingerprint": report.fingerprint,
        "moves": report.moves,
    }
    if report.groups:
        shown["groups"] = report.groups
    if context:
        shown["context"] = context
    if report.auto is not None:
        shown["auto"] = report.auto
    return shown


def context_object(report: ContextReport | None, rule: ContextRule) -> dict[str, int] | None:
    """What became of a context: what applies alone."""
    if report is None:
        return None
    shown: dict[str, int] = {}
    if rule.attention_window is not None:
        shown |= {"attention_window": rule.attention_window, "attention_sinks": rule.attention_sinks}
    elif report.window is not None:
        shown |= {
            "window": report.window,
            "kept_tokens": report.kept_tokens,
            "dropped_tokens": report.dropped_tokens,
            "shifts": report.shifts,
        }
    if report.reused_passages:
        shown |= {"reused_tokens": report.reused_tokens, "reused_passages": report.reused_passages}
    return shown


def model_rotation(info: ModelInfo) -> dict[str, Any] | None:
    """What `/v1/models` tells of it; None for a model that does not rotate."""
    return groups_object(info.rotary_groups) if main_group(info.rotary_groups).base.unrotated is None else None


def groups_object(groups: tuple[RotaryGroup, ...]) -> dict[str, Any]:
    """The main group's scaling and dimensions, and under `groups` every group's."""
    described = {group.name: _group(group) for group in groups}
    return {**described[groups[0].name], "groups": described}


def _group(group: RotaryGroup) -> dict[str, Any]:
    return {
        "rope_type": group.scaling.rope_type,
        **group.parameters(),
        "rotary_dim": group.base.rotary_dim,
        "original_max_position_embeddings": original_len(group.scaling, group.base),
        "max_position_embeddings": group.base.trained_len,
    }


def ladder_object(info: ModelInfo) -> dict[str, Any] | None:
    """What `auto` chooses from, as answers show it; None for a model that cannot be scaled."""
    if info.rotary_ladder is None:
        return None
    return {"default": info.rotary_auto, "steps": _steps(info.rotary_ladder, info.max_model_len)}


@lru_cache(maxsize=8)
def _steps(ladder: AutoScalingThresholds, longest: int) -> list[dict[str, Any]]:
    """The stages of a request that grows to `longest` tokens, as far as there are steps for it."""
    longest = longest if ladder.end is None else min(longest, ladder.end)
    plan, shown = make_auto_plan(ladder, longest, "recompute"), []
    length: int | None = 1
    while length is not None:
        stage = plan.stage(length)
        assert stage.choice is not None
        main = main_group(plan.groups_in(stage))
        effective = stage.effective_lengths[plan.groups.index(main_group(plan.groups))]
        step = {"up_to": stage.choice.up_to, "rope_scaling": main.scaling.to_dict(), "effective_length": effective}
        shown.append(step if stage.choice.step.profile is None else {**step, "profile": stage.choice.step.profile})
        length = None if stage.last_length is None else stage.last_length + 1
    return shown
