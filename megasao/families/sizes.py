"""Sizes of tensors as config.json gives them: a field, or sums and products of fields.

A size knows how it is written, so that a message can say what it follows from.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megasao.families.facts import HfConfig, expert_count, expert_key, head_dim


@dataclass(frozen=True)
class Size:
    """A whole number that follows from config.json.

    Attributes:
        text: how it is written, in fields of config.json.
        of: its value.
        fields: the fields; empty for one that is itself a field, or a plain number.
    """

    text: Callable[[HfConfig], str]
    of: Callable[[HfConfig], int]
    fields: tuple["Size", ...] = ()

    def __mul__(self, other: "Size") -> "Size":
        """The product."""
        return Size(
            lambda hf_config: f"{_factor(self, hf_config)} * {_factor(other, hf_config)}",
            lambda hf_config: self.of(hf_config) * other.of(hf_config),
            (*self.atoms(), *other.atoms()),
        )

    def __add__(self, other: "Size") -> "Size":
        """The sum."""
        return Size(
            lambda hf_config: f"{self.text(hf_config)} + {other.text(hf_config)}",
            lambda hf_config: self.of(hf_config) + other.of(hf_config),
            (*self.atoms(), *other.atoms()),
        )

    def atoms(self) -> tuple["Size", ...]:
        """The fields that it is made of: itself, if it is one."""
        return self.fields or (self,)


Shape = tuple[Size, ...]


def _factor(size: Size, hf_config: HfConfig) -> str:
    text = size.text(hf_config)
    return f"({text})" if " + " in text or " // " in text else text


def field(name: str) -> Size:
    """A field of config.json that :meth:`Family.check` has seen to be a whole number above 0."""
    return Size(lambda hf_config: name, lambda hf_config: int(hf_config[name]))


def constant(value: int) -> Size:
    """The same for every model."""
    return Size(lambda hf_config: str(value), lambda hf_config: value)


def _head_text(hf_config: HfConfig) -> str:
    return "head_dim" if hf_config.get("head_dim") else "hidden_size // num_attention_heads"


HIDDEN, VOCABULARY, FEED_FORWARD = field("hidden_size"), field("vocab_size"), field("intermediate_size")
HEADS, GROUPS, HEAD = field("num_attention_heads"), field("num_key_value_heads"), Size(_head_text, head_dim)
EXPERTS, EXPERT = Size(expert_key, expert_count), field("moe_intermediate_size")
SHARED_EXPERTS = field("n_shared_experts")


def dimensions(shape: Shape, hf_config: HfConfig) -> tuple[int, ...]:
    """The numbers of a shape."""
    return tuple(size.of(hf_config) for size in shape)


def explanation(shape: Shape, hf_config: HfConfig) -> str:
    """What a shape follows from, such as "(num_attention_heads * head_dim, hidden_size), with head_dim = 16, ..."."""
    fields = {atom.text(hf_config): atom.of(hf_config) for size in shape for atom in size.atoms()}
    given = ", ".join(f"{text} = {value}" for text, value in fields.items() if text != str(value))
    return (
        f"({', '.join(size.text(hf_config) for size in shape)}), with {given}" if given else "the same in every model"
    )
