"""SCV4xx: what a backend does, each rule one or more tests of :mod:`sconv_contract.behaviour`."""

from __future__ import annotations

from typing import Final

from .rule import Text

__all__ = ["BEHAVIOUR"]


def _table(*rows: tuple[str, str, str, str]) -> dict[str, Text]:
    return {row[0]: Text(*row) for row in rows}


BEHAVIOUR: Final = _table(
    (
        "SCV401",
        "loads",
        "It loads for every spec that its capabilities declare, and refuses the others by name.",
        "Compare BackendInfo.capabilities with what the factory takes.",
    ),
    (
        "SCV402",
        "decode",
        "A decode step has the oracle's outputs, within a rounding, and its state bit for bit.",
        "One token per row; the window moves on by it, in the kernel.",
    ),
    (
        "SCV403",
        "extend",
        "An extend step equals the oracle for rows of any length, fresh or resumed.",
        "The first K-1 tokens of a row read its window, and no token reads another row.",
    ),
    ("SCV404", "mixed", "A mixed step equals the oracle.", "It is an extend in every respect."),
    (
        "SCV405",
        "target verify",
        "A verify step has the oracle's outputs and leaves the state bit-unchanged.",
        "Keep inputs or windows beside the pool; write the pool in the commit.",
    ),
    (
        "SCV406",
        "commit",
        "A commit keeps the window after the last kept node, and the snapshots that are asked for.",
        "Index -1 keeps nothing; accept counts include the root, so a chain's index is count - 1.",
    ),
    (
        "SCV407",
        "draft extend",
        "A draft-extend step keeps exactly num_accept_tokens tokens, 0 and all included.",
        "The window ends after the accepted tokens, not after the row.",
    ),
    ("SCV408", "idle", "An idle step changes nothing.", "There may be rows, without a slot."),
    (
        "SCV409",
        "schedules",
        "Any order of steps equals the oracle.",
        "Something is kept from one step to the next that belongs to the first.",
    ),
    (
        "SCV410",
        "groups",
        "Streams convolved in one call equal the same streams convolved one by one.",
        "Element i of every sequence is one call of short_conv.",
    ),
    (
        "SCV411",
        "engine memory",
        "A step on adopted memory equals the oracle and touches nothing beside the windows.",
        "Use the pool's strides, its table of slots and its null slots; assume none of them.",
    ),
    (
        "SCV412",
        "verify layouts",
        "Every declared layout of verify windows restores bit-identical windows.",
        "A window is the K-1 newest inputs on the path to a node.",
    ),
    (
        "SCV413",
        "trees",
        "In a tree a node reads its ancestors, never its neighbours.",
        "Follow parents, or child and sibling links; a chain is never inferred.",
    ),
    (
        "SCV421",
        "padding",
        "A row without a slot reads zeros, outputs zeros and writes nothing (ruling 1).",
        "Slot -1 is no index; slot 0 is the dummy and belongs to nobody.",
    ),
    (
        "SCV422",
        "empty rows",
        "A row of length 0 changes nothing, and empty batches are legal (ruling 2).",
        "Guard launches of no blocks, and gathers from no row.",
    ),
    (
        "SCV423",
        "stale state",
        "A NaN in a stale slot never reaches an output (ruling 3).",
        "Select with the mask; multiplying by zero keeps a NaN.",
    ),
    (
        "SCV424",
        "skipped commits",
        "A verify step whose commit is skipped loses nothing (ruling 5).",
        "A verify step must not write the persistent window.",
    ),
    (
        "SCV425",
        "slots at the commit",
        "The commit looks slots up when it is called, and skips rows that lost theirs (ruling 6).",
        "Translate req_pool_indices in the commit; forward_metadata may be another step's.",
    ),
    (
        "SCV426",
        "neighbours",
        "Results do not depend on which other rows are in the batch (ruling 10).",
        "Sum taps in one order whatever the batch size.",
    ),
    (
        "SCV427",
        "refusals",
        "A wrong argument is refused before anything changes.",
        "Let PluginBackend plan the step, or check before the first write.",
    ),
    (
        "SCV428",
        "metadata",
        "The step's metadata has the documented shapes, dtypes and values, one object for all"
        " layers.",
        "docs/reference/step-metadata.md lists the fields.",
    ),
    (
        "SCV429",
        "forward_metadata",
        "forward_metadata can be read, set and put back.",
        "A hybrid passes it through, and an engine sets it to None around an idle step.",
    ),
    (
        "SCV430",
        "snapshots",
        "A snapshot is the window after exactly the tokens that it is labelled with.",
        "Rows of track_conv_indices are packed tokens, or columns of the old window.",
    ),
    (
        "SCV431",
        "warm-up",
        "warmup() may be called at any time before serving, and changes no state.",
        "Compile on scratch memory, or on slot -1.",
    ),
    (
        "SCV433",
        "weights",
        "Weights may be [D, K] or [D, 1, K], and weights and biases may have any strides.",
        "Pass the strides on to the kernel, or copy a weight once that it cannot read.",
    ),
    (
        "SCV434",
        "process",
        "Default dtype and device, grad and inference mode, autocast, deterministic mode, thread"
        " count and random state change no result, and no call changes them (ruling 12).",
        "Give every tensor that is made a dtype and a device, and make what outlives a step under"
        " torch.inference_mode(False).",
    ),
    (
        "SCV441",
        "no host sync",
        "The in-graph hooks hand no device value to the host, in any mode.",
        "sconv verify names the line, if it is Python's.",
    ),
    (
        "SCV442",
        "fixed addresses",
        "Two steps of one batch size have their metadata at the same addresses.",
        "Slice buffers that init_graph_state made; slices start at 0.",
    ),
    (
        "SCV443",
        "replay",
        "A recorded step, replayed with other rows, lengths and values, equals the oracle, whatever"
        " else is captured on the backend.",
        "A captured shape must not decide by values, no Python runs in a replay, and what a graph"
        " has seen is never allocated anew.",
    ),
    (
        "SCV444",
        "no allocation",
        "The in-graph metadata hook leaves no new memory behind.",
        "Fill buffers that init_graph_state made, with out= or copy_.",
    ),
    (
        "SCV445",
        "graph buffers",
        "A batch that does not fit the buffers raises GraphBufferError with have and need.",
        "Captured buffers never grow.",
    ),
)
