"""From a name and a spec to a :class:`~sconv.Backend`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ..discovery.load_check import bind
from ..discovery.observers import Observers
from ..discovery.selection import choose, resolve_factory, select
from ..errors import BackendNotFoundError, ContractError, PluginError, SconvError, SpecError
from ..hookspecs import BackendInfo
from ..messages import kind_of, one_line_error
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec, check_is_spec
from ..state.windows import choose_layout
from .backend import Backend
from .checked import CheckedBackend, checks_state

__all__ = ["build", "choose_device", "hold", "load_backend"]


def load_backend(
    name: str = "auto",
    *,
    spec: StateSpec,
    device: torch.device | str | None = None,
    pool: ConvStatePool | None = None,
) -> Backend:
    """Select a backend, build it for a spec, and check that it keeps the contract.

    Args:
        name: An installed backend, or ``"auto"`` for ``SCONV_BACKEND`` or else the best one that
            serves ``device``.
        spec: The state that it is built for.
        device: Where the state lies; None = where ``pool`` does, else the backend's device type.
            An accelerator without an index means its current one: what is built has it in its name.
        pool: State that the engine owns (:meth:`sconv.ConvStatePool.adopt`); None = allocate it.

    Raises:
        BackendNotFoundError: No such backend is installed; the message lists what is.
        BackendUnavailableError: It cannot run here; the message says why.
        PluginError: It failed to load, or two plugins claim the same name or priority.
        ContractError: It does not keep the contract, or keeps its verify windows in another layout
            than it declares; the message says what to change.
        SpecError: It does not support the spec, or ``pool`` lies on another device.
    """
    if not isinstance(name, str):
        raise BackendNotFoundError(
            f"name is {name!r}: expected the name of an installed backend, or 'auto'"
        )
    check_is_spec(spec)
    if pool is not None and not isinstance(pool, ConvStatePool):
        raise SpecError(
            f"pool is {kind_of(pool)}: expected a sconv.ConvStatePool, made by its adopt()"
        )
    wanted = None if device is None else _device_type(device)
    info = select(name, device_type=wanted)
    if wanted not in (None, info.device_type):
        raise SpecError(
            f"backend {info.name!r} serves {info.device_type!r} devices, not {str(device)!r}"
        )
    return build(info, spec=spec, device=device, pool=pool)


def choose_device(name: str = "auto", device: str | None = None) -> torch.device:
    """Return the device that :func:`sconv.load_backend` would use, before there is a spec.

    An engine that loads a model first asks this, so that a mistyped name fails before the model is
    loaded. The vendor's module is imported: it may be what makes torch know its device.

    Args:
        name: As for ``load_backend``.
        device: A device's name, such as ``"cuda:1"``; None = the device type of the backend.

    Raises:
        BackendNotFoundError: No such backend is installed.
        BackendUnavailableError: It cannot run here.
        PluginError: It is broken, or torch does not know the device that it says it serves.
        SpecError: ``device`` is not one that the backend serves, or there is no such device here.
    """
    if device is None:
        chosen = choose(name)[0]
        resolve_factory(chosen)
        try:
            return torch.device(chosen.device_type)
        except RuntimeError as exc:
            raise PluginError(
                f"{chosen} is for the device {chosen.device_type!r}, which this torch does not "
                "know: importing what its plugin's factory names should make it known. Repair that "
                "plugin, or choose another backend"
            ) from exc
    kind = device.partition(":")[0]
    chosen = choose(name, device_type=kind)[0]
    if chosen.device_type != kind:
        raise SpecError(f"{chosen} serves {chosen.device_type!r} devices, not {device!r}")
    resolve_factory(chosen)
    try:
        where = torch.device(device)
    except RuntimeError as exc:
        raise SpecError(
            f"expected a device that torch knows, such as {kind} or {kind}:0, not {device!r}"
        ) from exc
    try:
        return torch.empty(0, dtype=torch.float32, device=where).device
    except (RuntimeError, AssertionError) as exc:
        raise SpecError(f"there is no {device!r} here: {one_line_error(exc)}") from exc


def build(
    info: BackendInfo,
    *,
    spec: StateSpec,
    device: torch.device | str | None = None,
    pool: ConvStatePool | None = None,
) -> Backend:
    """Build a backend that was selected; see :func:`load_backend`, which selects it too."""
    layout = check_spec(info, spec)
    if pool is not None:
        layout = _check_pool(info, spec, pool, layout)
    # Before the device is named: importing a vendor's module may be what makes torch know it.
    factory = resolve_factory(info)
    where = _place(info, device, pool)
    try:
        implementation = factory(spec=spec, device=where, pool=pool)
    except SconvError:
        raise
    except Exception as exc:
        raise PluginError(f"{info}: its factory failed: {one_line_error(exc)}") from exc
    _check_made(implementation, info)
    backend = hold(implementation, info, spec)
    if spec.max_draft_tokens > 1:
        _check_layout(info, implementation.pool, layout)
    return backend


def hold(implementation: Any, info: BackendInfo, spec: StateSpec) -> Backend:
    """Check an object's hooks and hold it as engines do, in checked mode if that is on.

    Raises:
        ContractError: It does not keep the contract.
    """
    hooks, manager = bind(implementation, info)
    if spec.recurrent is not None and "gated_delta" not in hooks:
        raise ContractError(
            f"{info} declares Capabilities(gated_delta=True), and what its factory made has no "
            "hook 'gated_delta': implement it, or do not declare it"
        )
    kind = CheckedBackend if checks_state() else Backend
    return kind(
        info=info,
        spec=spec,
        device=implementation.pool.device,
        implementation=implementation,
        hooks=hooks,
        observers=Observers(manager),
    )


def _place(
    info: BackendInfo, device: torch.device | str | None, pool: ConvStatePool | None
) -> torch.device:
    """Name the device of the state as its tensors do, index included."""
    try:
        where = torch.device(info.device_type if device is None else device)
    except RuntimeError as exc:
        raise SpecError(f"{info}: torch has no such device: {one_line_error(exc)}") from exc
    if pool is None:
        return _as_tensors_name_it(where)
    there = pool.device
    if where.type == there.type and (where.index is None or _as_tensors_name_it(where) == there):
        return there
    raise SpecError(
        f"{info}: the adopted pool lies on {there}, and the backend would be built on {where}: "
        "give the device of the pool, or none"
    )


def _as_tensors_name_it(device: torch.device) -> torch.device:
    """Return a device with the index that its tensors have: the current one, if it has none.

    ``torch.device("npu")`` and the device of a tensor made there, ``npu:0``, are not equal; the
    host's has no index. What torch has no tensor of is returned as it is: the vendor's own code can
    say why.
    """
    if device.index is not None and device.type != "cpu":
        return device
    try:
        return torch.empty(0, device=device, dtype=torch.float32).device
    except Exception:
        # No one type: a torch without CUDA raises AssertionError, a vendor's library what it likes.
        return device


def _check_made(made: object, info: BackendInfo) -> None:
    """Refuse what has no hook by its nature; of other objects :func:`bind` says what they lack."""
    if type(made).__module__ == "builtins" and not isinstance(made, type | ModuleType):
        hint = "; is its return missing?" if made is None else ""
        raise ContractError(
            f"{info}: its factory {info.factory!r} returned {kind_of(made)}: expected the object "
            f"that implements the hooks{hint}"
        )


def _device_type(device: torch.device | str) -> str:
    if isinstance(device, str):
        return device.partition(":")[0]
    if isinstance(device, torch.device):
        return device.type
    raise SpecError(f"device is {device!r}: expected a torch.device, or its name such as 'cpu'")


def check_spec(info: BackendInfo, spec: StateSpec) -> str:
    """Refuse a spec that a backend does not declare support for.

    Returns:
        The layout of the verify windows that the backend is to keep for it.

    Raises:
        SpecError: The message names the plugin and every capability that is missing.
    """
    can = info.capabilities
    low, high = can.kernel_sizes
    dtype = str(spec.dtype).removeprefix("torch.")
    missing = []
    if not low <= spec.kernel_size <= high:
        missing.append(f"kernel_size={spec.kernel_size} (it takes {low} to {high})")
    if dtype not in can.dtypes:
        missing.append(f"dtype={dtype} (it takes {', '.join(can.dtypes)})")
    if spec.window_axis not in can.window_axes:
        missing.append(f"window_axis={spec.window_axis!r} (it takes {', '.join(can.window_axes)})")
    if spec.max_draft_tokens > 1 and not can.rollback:
        missing.append(f"rollback, which max_draft_tokens={spec.max_draft_tokens} needs")
    if spec.draft_topk > 1 and not can.trees:
        missing.append(f"trees, which draft_topk={spec.draft_topk} needs")
    if spec.recurrent is not None and not can.gated_delta:
        missing.append("gated_delta, which recurrent=GatedDelta(...) needs")
    if missing:
        raise SpecError(
            f"backend {info.name!r} ({info.origin}) does not support {'; '.join(missing)}"
        )
    name = f"backend {info.name!r} ({info.origin})"
    return choose_layout(spec, can.window_layouts, backend=name)


def _check_pool(info: BackendInfo, spec: StateSpec, pool: ConvStatePool, layout: str) -> str:
    """Return the layout in force with an engine's pool."""
    if pool.spec != spec:
        raise SpecError("the adopted pool was made for another StateSpec than the one given")
    if not pool.has_windows or spec.max_draft_tokens == 1:
        return layout
    kept = info.capabilities.window_layouts
    if pool.window_layout not in kept:
        raise SpecError(
            f"backend {info.name!r} ({info.origin}) does not keep the {pool.window_layout} verify "
            f"windows that the pool brings (it keeps {', '.join(kept)}): adopt the state alone"
        )
    return pool.window_layout


def _check_layout(info: BackendInfo, pool: ConvStatePool, layout: str) -> None:
    if pool.window_layout != layout:
        raise ContractError(
            f"{info} declares window_layouts={info.capabilities.window_layouts}, so that this spec "
            f"gets {layout!r}, and built {pool.window_layout!r}: declare what the backend keeps, "
            "first choice first, in its class's window_layouts too"
        )
