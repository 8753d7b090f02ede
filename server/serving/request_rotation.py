"""Rotary scaling of a request: checks, plan and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.context import ContextSize
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.rotary.auto_scaling import AUTO, AUTO_NAME
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryGroup, apply_scaling, main_group
from windlass.engine.rotary.rotary_policy import RopeUpdate, RotaryPlan, RotaryPlanner, RotaryReport
from windlass.engine.rotary.scaling_fields import KINDS
from windlass.server.config.rope_profiles import DEFAULT_NAME, OPTION
from windlass.server.config.settings import ServerSettings

if TYPE_CHECKING:
    from windlass.server.schemas.base import RopeUpdateObject


NOT_ALLOWED = "rope_scaling_not_allowed"
_MAX_LISTED_NAMES = 20  # of profiles in an error


@dataclass(frozen=True, slots=True)
class Rotation:
    """The checked scaling of a request. scaling: None for the server's default, `AUTO` for the least that the length needs."""

    scaling: RopeScaling | None
    update: RopeUpdate | None
    exact: bool
    planner: RotaryPlanner

    def plan(self, longest: int) -> RotaryPlan:
        """The engine's plan for a request of at most `longest` tokens."""
        return self.planner.plan(longest, self.scaling, self.update, exact=self.exact)

    def metric_label(self, requested: Any) -> str:
        """Metric label: profile name, "auto", kind or "default". requested: field of the body."""
        if isinstance(requested, str):
            return requested
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

    rope_scaling: field of the body: an object, a profile's name, "auto" or None.
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
    if rope_update is None:
        return Rotation(scaling, None, False, planner)
    return Rotation(scaling, rope_update.policy, bool(rope_update.exact), planner)


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
    if policy == "profiles" and isinstance(rope_scaling, dict):
        raise RequestError(
            "rope_scaling must be the name of a profile on this server (--rope-policy profiles), not an object: "
            + _list_profiles(settings.rope_profiles),
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
    if value not in profiles:
        is_kind = value in KINDS
        written = '; a kind is written as an object such as {"rope_type": "yarn", "factor": 4}' if is_kind else ""
        raise RequestError(
            f"rope_scaling: there is no profile {value[:64]!r} on this server: {_list_profiles(profiles)}{written}",
            "rope_scaling",
            "unknown_profile",
        )
    return profiles[value]


def _list_profiles(profiles: Mapping[str, RopeScaling]) -> str:
    if not profiles:
        return "it has none (the operator declares them with --rope-profile)"
    names = sorted(profiles)
    more = f" and {len(names) - _MAX_LISTED_NAMES} more (see GET /v1/rotary)" if len(names) > _MAX_LISTED_NAMES else ""
    return f"it has {', '.join(names[:_MAX_LISTED_NAMES])}{more}"
