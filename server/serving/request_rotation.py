"""Rotary scaling of a request: checks, plan and report, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from windlass.engine.errors import LoadError, RequestError, did_you_mean
from windlass.engine.interface.context import ContextReport, ContextRule, ContextSize
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.rotary.auto_scaling import AUTO, AUTO_NAME, AutoScalingThresholds
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryGroup, apply_scaling, main_group, original_len
from windlass.engine.rotary.rotary_policy import RopeUpdate, RotaryPlan, RotaryPlanner, RotaryReport, make_auto_plan
from windlass.engine.rotary.scaling_fields import KNOWN
from windlass.engine.rotary.scaling_text import names_kind, parse_scaling
from windlass.server.config.engine_options import DEFAULT_NAME, OPTION
from windlass.server.config.settings import ServerSettings

if TYPE_CHECKING:
    from windlass.server.schemas.base import RopeUpdateObject


NOT_ALLOWED = "rope_scaling_not_allowed"
_MAX_LISTED_NAMES = 20  # of profiles in an error


@dataclass(frozen=True, slots=True)
class Rotation:
    """The checked scaling of a request.

    scaling: None for the server's default, `AUTO` for the least that the length needs. name: by which the request names it: a
    profile or "auto".
    """

    scaling: RopeScaling | None
    update: RopeUpdate | None
    exact: bool
    planner: RotaryPlanner
    name: str | None = None

    def plan(self, longest: int) -> RotaryPlan:
        """The engine's plan for a request of at most `longest` tokens."""
        return self.planner.plan(longest, self.scaling, self.update, exact=self.exact)

    @property
    def metric_label(self) -> str:
        """Metric label: profile name, "auto", kind or "default"."""
        if self.name is not None:
            return self.name
        return DEFAULT_NAME if self.scaling is None else self.scaling.rope_type

    @property
    def chooses_scaling(self) -> bool:
        """Whether the length of the request chooses its scaling (`auto`)."""
        return self.planner.chooses(self.scaling)

    @property
    def longest(self) -> int | None:
        """Length at which the thresholds of `auto` end; None if there is no such limit."""
        ladder = self.planner.ladder
        return ladder.end if ladder is not None and self.chooses_scaling else None

    def limit_context(self, size: ContextSize) -> ContextSize:
        """The context size, shortened if the thresholds of `auto` end before it."""
        most = self.longest
        return size if most is None or size.rotary_length <= most else replace(size, longest=min(size.longest, most))

    def check_length(self, prompt_tokens: int, max_tokens: int, size: ContextSize) -> None:
        """Raise RequestError if prompt and requested output exceed the thresholds of `auto`. size: before `limit_context`."""
        most = self.longest
        if most is None or prompt_tokens >= most or min(prompt_tokens + max_tokens, size.rotary_length) <= most:
            return
        raise RequestError(
            f"max_tokens: {prompt_tokens} tokens of prompt and {max_tokens} of output are more than the {most} that "
            f"rope_scaling auto allows on this server: ask for at most {most - prompt_tokens}, or name a scaling",
            "max_tokens",
            "context_length_exceeded",
        )


def build_planner(settings: ServerSettings, info: ModelInfo) -> RotaryPlanner:
    """A planner with the engine's settings."""
    return RotaryPlanner(info.rotary_groups, settings.rope_update, info.rotary_ladder, info.rotary_auto)


def resolve_rotation(
    rope_scaling: Any, rope_update: RopeUpdateObject | None, settings: ServerSettings, info: ModelInfo
) -> Rotation:
    """The rotation of a request; raises RequestError naming the field and its allowed values.

    rope_scaling: field of the body: an object, a profile's name, "auto", a scaling in its short form, or None.
    """
    _check_allowed(rope_scaling, rope_update, settings)
    rotation = parse_rotation(rope_scaling, rope_update, settings, info)
    if rotation.scaling is not None and rotation.scaling.depends_on_length:
        # These kinds may exceed the range of usable frequencies only at full length.
        rotation.plan(info.max_model_len).stage(info.max_model_len)
    return rotation


def parse_rotation(
    rope_scaling: Any, rope_update: RopeUpdateObject | None, settings: ServerSettings, info: ModelInfo
) -> Rotation:
    """`resolve_rotation` regardless of the server's rope policy, for requests without output."""
    scaling, planner = _parse_scaling(rope_scaling, settings.rope_profiles), build_planner(settings, info)
    if planner.chooses(scaling):
        planner.plan(1, scaling)
    else:
        apply_scaling(planner.groups, scaling)
    named = isinstance(rope_scaling, str) and (rope_scaling == AUTO_NAME or rope_scaling in settings.rope_profiles)
    name = rope_scaling if named else None
    if rope_update is None:
        return Rotation(scaling, None, False, planner, name)
    return Rotation(scaling, rope_update.policy, bool(rope_update.exact), planner, name)


def check_profiles(profiles: Mapping[str, RopeScaling], groups: tuple[RotaryGroup, ...]) -> None:
    """Raise LoadError, naming the profile, if this model does not support one."""
    for name, scaling in profiles.items():
        try:
            apply_scaling(groups, scaling, param=f"{OPTION} {name}")
        except RequestError as error:
            raise LoadError(error.message) from None


def report_at(plan: RotaryPlan, prompt_tokens: int, tokens: int) -> RotaryReport:
    """The report of a sample that the server, not the engine, ended after `tokens` tokens.

    The last of these tokens was sampled but not computed, so the context is one shorter.
    """
    length = prompt_tokens + max(tokens - 1, 0)
    if plan.policy != "rotate":
        return plan.report(plan.stage(length), 0)
    stage, moves = plan.stage(prompt_tokens), 0
    while stage.last_length is not None and stage.last_length < length:
        stage = plan.stage(stage.last_length + 1)
        moves += 1
    return plan.report(stage, moves)


def check_has_rotary(info: ModelInfo) -> None:
    """Raise RequestError for a model without rotary layers."""
    why = main_group(info.rotary_groups).base.unrotated
    if why is not None:
        raise RequestError(f"this model does not rotate: {why}", "model", "no_rotation")


def _check_allowed(rope_scaling: Any, rope_update: RopeUpdateObject | None, settings: ServerSettings) -> None:
    policy = settings.rope_policy
    if policy == "off":
        for name, value in (("rope_scaling", rope_scaling), ("rope_update", rope_update)):
            if value is not None:
                raise RequestError(
                    f"{name} cannot be set by requests on this server (--rope-policy off): leave it out",
                    name,
                    NOT_ALLOWED,
                )
    is_text = isinstance(rope_scaling, str) and rope_scaling not in settings.rope_profiles and names_kind(rope_scaling)
    if policy == "profiles" and (is_text or isinstance(rope_scaling, dict)):
        raise RequestError(
            "rope_scaling must be the name of a profile on this server (--rope-policy profiles), not "
            f"{'a scaling' if is_text else 'an object'}: " + _list_profiles(settings.rope_profiles),
            "rope_scaling",
            NOT_ALLOWED,
        )
    if rope_update is not None and rope_update.exact and not settings.rope_exact:
        raise RequestError(
            "rope_update.exact is not allowed on this server: leave it out (the operator allows it with --rope-policy exact)",
            "rope_update.exact",
            "rope_exact_not_allowed",
        )


def _parse_scaling(value: Any, profiles: Mapping[str, RopeScaling]) -> RopeScaling | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return RopeScaling.from_dict(value)
    if value == AUTO_NAME:
        return AUTO
    if value in profiles:
        return profiles[value]
    if names_kind(value):
        return parse_scaling(value)
    meant = did_you_mean((value.split() or [""])[0], [*profiles, *KNOWN])
    raise RequestError(
        f"rope_scaling: {value[:64]!r} is neither a kind of scaling nor a profile of this server{meant}: "
        + _list_profiles(profiles),
        "rope_scaling",
        "unknown_profile",
    )


def _list_profiles(profiles: Mapping[str, RopeScaling]) -> str:
    if not profiles:
        return "it has no profiles (the operator declares them with --rope-profile)"
    names = sorted(profiles)
    more = f" and {len(names) - _MAX_LISTED_NAMES} more (see GET /v1/rotary)" if len(names) > _MAX_LISTED_NAMES else ""
    return f"its profiles are {', '.join(names[:_MAX_LISTED_NAMES])}{more}"


# ---- JSON ------------------------------------------------------------------------------------------------------------
def rotary_object(
    report: RotaryReport, context: ContextReport | None, rule: ContextRule, dropped_turns: int | None
) -> dict[str, Any]:
    """The `rotary` field of a response. dropped_turns: of a chat, None if none may be dropped."""
    names = ("rope_type", "parameters", "policy", "effective_length", "fingerprint", "moves")
    shown: dict[str, Any] = {name: getattr(report, name) for name in names}
    if report.groups:
        shown["groups"] = report.groups
    context_fields = _context_object(context, rule)
    if dropped_turns is not None:
        context_fields["dropped_turns"] = dropped_turns
    if context_fields:
        shown["context"] = context_fields
    if report.auto is not None:
        shown["auto"] = report.auto
    return shown


def _context_object(report: ContextReport | None, rule: ContextRule) -> dict[str, int]:
    """The fields that apply under `rule`; empty without a report."""
    shown: dict[str, int] = {}
    if report is None:
        return shown
    if rule.attention_window is not None:
        shown |= {"attention_window": rule.attention_window, "attention_sinks": rule.attention_sinks}
    elif report.window is not None:
        names = ("window", "kept_tokens", "dropped_tokens", "shifts")
        shown |= {name: getattr(report, name) for name in names}
    if report.reused_passages:
        shown |= {"reused_tokens": report.reused_tokens, "reused_passages": report.reused_passages}
    return shown


def model_rotary_object(info: ModelInfo) -> dict[str, Any] | None:
    """The `rotary` field of `/v1/models`; None for a model without rotary attention."""
    return groups_object(info.rotary_groups) if main_group(info.rotary_groups).base.unrotated is None else None


def groups_object(groups: tuple[RotaryGroup, ...]) -> dict[str, Any]:
    """Scaling and dimensions of the main group, and of every group under `groups`."""
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


def auto_scaling_object(info: ModelInfo) -> dict[str, Any] | None:
    """The thresholds of `auto`; None for a model that cannot be scaled."""
    if info.rotary_ladder is None:
        return None
    return {"default": info.rotary_auto, "steps": _steps(info.rotary_ladder, info.max_model_len)}


@lru_cache(maxsize=8)
def _steps(ladder: AutoScalingThresholds, longest: int) -> list[dict[str, Any]]:
    """The stages of a request that grows to `longest` tokens, up to the last threshold."""
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
