//! The intermediate results of a stack.

/// An intermediate result: contiguous rows, one per token, or after the selection one per sampled row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Register {
    /// The embeddings, to which layers add.
    Residual,
    /// The input of attention or MLP.
    Normed,
    /// Queries, keys and values.
    Qkv,
    Attended,
    /// Queries, keys and values, and a gate for each element of `Attended`.
    GatedQkv,
    /// These gates.
    Gates,
    /// The input of a layer that keeps a state.
    Mixed,
    /// What a convolution makes of it.
    Convolved,
    /// Its numbers for each head, or for all channels.
    Rates,
    /// Its numbers for each channel.
    Steps,
    /// Its decays, if these are computed apart.
    Decays,
    /// What all heads of latent attention share, before it is normed and rotated: the latent of the queries if there is
    /// one, the latent of keys and values, and the rotated part of the keys. Or what steps are made of.
    Latents,
    /// The normed latent of the queries.
    QueryLatent,
    /// The plain parts of the queries of all heads, and then their rotated parts.
    Queries,
    /// Queries, keys and values of heads that the cache pads, before they are padded; then what they attended to without its padding.
    Unpadded,
    /// The values of all heads, which latent attention makes of what it attended to.
    Values,
    /// The first product of an MLP or of a projection of low rank.
    Inner,
    /// The MLP's activated product.
    Activated,
    /// What attention or MLP add to the residual.
    Projected,
    /// What attention and MLP together add to it.
    Sum,
    /// The columns of all ranks.
    Gathered,
    /// This rank's columns of a product of what was gathered.
    Part,
    /// The input of a layer in the order of its weight's columns.
    Ordered,
    /// The router's.
    Logits,
    /// The inputs of each row's experts, and then their outputs, ordered by expert.
    Routed,
    /// What the shared expert adds to the sum of the experts.
    Shared,
    /// The shared expert's logit.
    Gate,
    /// The output of the stack.
    Output,
}

/// Number of registers.
const NUM_REGISTERS: usize = Register::Output as usize + 1;

/// A value per register.
pub(super) type PerRegister<T> = [T; NUM_REGISTERS];
