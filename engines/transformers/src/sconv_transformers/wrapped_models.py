"""What is between a user's model and its modules: wrappers, replaced ``forward`` methods."""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

from torch import nn
from transformers import GenerationMixin

from .conv_hook import hook_of
from .conv_modules import ConvModule
from .step_runner import StepRunner

__all__ = ["check_forward", "guard_generate", "reroute_forward", "unguard_generate", "unwrapped"]

#: Where an instance may hold a bound ``forward``. accelerate puts its own first and keeps the
#: module's second; what it has removed its hooks from keeps the module's first.
_HOLDERS = ("forward", "_old_forward")

#: What transformers takes for an assistant model that says nothing.
_ASSISTANT_TOKENS = 20


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of ``torch.compile`` and of a ``PeftModel``, or the model itself."""
    while True:
        inner = vars(model).get("_modules", {}).get("_orig_mod")
        if inner is None and type(model).__module__.partition(".")[0] == "peft":
            inner = model.get_base_model()  # type: ignore[operator]
        if inner is None or inner is model:
            return model
        model = inner


def check_forward(conv: ConvModule, name: str) -> None:
    """Refuse a module whose ``forward`` was replaced in the instance by what is not known.

    Raises:
        TypeError: A call of the module would not reach its class.
    """
    held = {holder: vars(conv.module)[holder] for holder in _HOLDERS if holder in vars(conv.module)}
    if held and not any(_is_forward_of(bound, conv.kind.stock_class) for bound in held.values()):
        raise TypeError(
            f"{name} has a forward of its own in the instance, so its class's is not called: "
            "attach before it is replaced, or take the replacement off"
        )


def reroute_forward(module: nn.Module, source: type[nn.Module], target: type[nn.Module]) -> None:
    """Make methods that the instance holds for ``source.forward`` those of ``target``."""
    for holder in _HOLDERS:
        if _is_forward_of(vars(module).get(holder), source):
            setattr(module, holder, MethodType(target.forward, module))


def guard_generate(model: nn.Module) -> None:
    """Have ``model.generate`` refuse more draft tokens than can be taken back, before it starts."""
    if isinstance(model, GenerationMixin) and "generate" not in vars(model):
        model.generate = MethodType(_generate, model)  # type: ignore[assignment]


def unguard_generate(model: nn.Module) -> None:
    """Undo :func:`guard_generate`."""
    bound = vars(model).get("generate")
    if isinstance(bound, MethodType) and bound.__func__ is _generate:
        del model.generate


@wraps(GenerationMixin.generate)
def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    runner = next((hook.state.runner for hook in map(hook_of, self.modules()) if hook), None)
    if runner is not None:
        _check_drafts(self, runner, kwargs)
    return type(self).generate(self, *args, **kwargs)


def _check_drafts(model: Any, runner: StepRunner, options: dict[str, Any]) -> None:
    config = options.get("generation_config") or model.generation_config
    name, drafted = "prompt_lookup_num_tokens", options.get("prompt_lookup_num_tokens")
    if drafted is None:
        drafted = getattr(config, name, None)
    assistant = options.get("assistant_model")
    if assistant is not None:
        name = "num_assistant_tokens of the assistant model"
        drafted = assistant.generation_config.num_assistant_tokens
        drafted = _ASSISTANT_TOKENS if drafted is None else drafted
    if isinstance(drafted, int) and drafted > runner.max_rollback:
        raise ValueError(
            f"{name}={drafted} may take back {drafted} tokens at once, and the model was attached "
            f"with max_rollback={runner.max_rollback}: attach with max_rollback={drafted} or more"
        )


def _is_forward_of(bound: object, owner: type[nn.Module]) -> bool:
    return isinstance(bound, MethodType) and bound.__func__ is owner.forward
