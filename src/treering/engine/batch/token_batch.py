"""The tokens of one forward pass: where each stands, what it sees, and where its key and value are written."""

from dataclasses import dataclass

from treering.arrays import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """The tokens of one pass; int64 [T] each but `wanted`.

    Every layer writes the keys and values of all tokens before any token reads.

    Example: a rollout's 3rd token behind a prompt of 5, its prompt at slots 0-4 and its own span from slot 40: position
    7, slot 42, prefix_start 0, num_prefix 5, own_start 40, num_own 3. Behind it two drafts for the same place, the
    second with one behind it, at slots 43, 44 and 45: positions 8, 8 and 9, num_own 3, tree_start 43, and tree_bits
    0b001, 0b010 and 0b110.
    """

    tokens: Int64Array
    """Token ids."""
    positions: Int64Array
    """Absolute positions, for RoPE."""
    slots: Int64Array
    """Where the token's key and value go."""
    prefix_start: Int64Array
    """First slot of the shared prefix that it sees."""
    num_prefix: Int64Array
    """Slots of the prefix, all of them visible; 0 is none."""
    own_start: Int64Array
    """First slot of its own span."""
    num_own: Int64Array
    """Visible slots of its own span, from the first; its own one is the last of them, or one of its tree."""
    tree_start: Int64Array
    """Slot of the first drafted token of its tree; not read where tree_bits is 0."""
    tree_bits: Int64Array
    """Bit j, of 64 and unsigned, makes slot tree_start + j visible, none of them twice; 0 outside of trees."""
    wanted: Int64Array
    """[W] indices of the tokens whose logits are wanted, ascending."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.tokens.size)
