"""What a run did: a short table, or one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

__all__ = ["Comparison", "Difference", "Output", "Report"]


@dataclass(frozen=True, slots=True)
class Output:
    """One prompt's continuation."""

    prompt: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which the stock path differs; None = that side has ended before.

    Attributes:
        prompt: Number of the prompt, from 0.
        position: Number of the new token, from 0.
        sconv: Token of the attached model.
        transformers: Token of the stock model.
    """

    prompt: int
    position: int
    sconv: int | None
    transformers: int | None

    @classmethod
    def first(cls, got: list[list[int]], expected: list[list[int]]) -> Difference | None:
        """Return the first difference between two runs over the same prompts, None if equal."""
        for prompt, (ours, stock) in enumerate(zip(got, expected, strict=True)):
            for position in range(max(len(ours), len(stock))):
                pair = [
                    tokens[position] if position < len(tokens) else None for tokens in (ours, stock)
                ]
                if pair[0] != pair[1]:
                    return cls(prompt, position, *pair)
        return None

    def __str__(self) -> str:
        ours, stock = (
            "the end" if token is None else f"token {token}"
            for token in (self.sconv, self.transformers)
        )
        return (
            f"prompt {self.prompt + 1}, new token {self.position + 1}: {ours} through sconv, "
            f"{stock} through stock transformers"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same run through stock transformers."""

    seconds: float
    tokens_per_second: float
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Report:
    """A finished run.

    Attributes:
        model: Its name or folder.
        backend: The backend that held the state.
        device: Where it ran.
        dtype: Dtype of the state.
        layers: Layers that have convolutions.
        streams: Convolutions of a layer.
        state_bytes: Physical bytes of the state and of its verify windows.
        steps: Forwards.
        metadata_builds: Times that step metadata was built.
        draft: How drafts were made.
        drafted: Candidate tokens that were verified.
        accepted: Candidate tokens that were kept.
        new_tokens: Tokens that were generated.
        seconds: Time that generation took, prefill included.
        outputs: The texts.
        compare: The stock run, where asked for.
    """

    model: str
    backend: str
    device: str
    dtype: str
    layers: int
    streams: int
    state_bytes: int
    steps: int
    metadata_builds: int
    draft: str
    drafted: int
    accepted: int
    new_tokens: int
    seconds: float
    outputs: list[Output] = field(default_factory=list)
    compare: Comparison | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of generation."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def builds_per_step(self) -> float:
        """Metadata builds per forward."""
        return self.metadata_builds / self.steps if self.steps else 0.0

    def as_json(self) -> str:
        """Return one JSON object, in one line."""
        value = asdict(self)
        value["tokens_per_second"] = round(self.tokens_per_second, 3)
        value["metadata_builds_per_step"] = round(self.builds_per_step, 6)
        if self.compare is not None:
            value["compare"]["equal"] = self.compare.difference is None
        # In ASCII, which every terminal and every reader has.
        return json.dumps(value)

    def rows(self) -> list[tuple[str, str]]:
        """Return the table: name and value."""
        rows = [
            ("backend", f"{self.backend} on {self.device}, {self.dtype}"),
            ("layers x streams", f"{self.layers} x {self.streams}"),
            ("state", f"{self.state_bytes:,} bytes"),
            ("steps", f"{self.steps:,}"),
            ("metadata builds per step", f"{self.builds_per_step:.3f}"),
            ("drafted / accepted", self._drafts()),
            ("new tokens", f"{self.new_tokens:,}"),
            ("tokens per second", f"{self.tokens_per_second:,.1f}"),
        ]
        if self.compare is not None:
            equal = (
                "equal"
                if self.compare.difference is None
                else f"differs at {self.compare.difference}"
            )
            rows += [
                ("stock transformers", equal),
                ("its tokens per second", f"{self.compare.tokens_per_second:,.1f}"),
            ]
        return rows

    def _drafts(self) -> str:
        if self.draft == "none":
            return "no drafts"
        share = f" ({self.accepted / self.drafted:.0%})" if self.drafted else ""
        return f"{self.drafted:,} / {self.accepted:,}{share}"

    def table(self) -> str:
        """Return the rows as aligned lines."""
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows()) + "\n"
