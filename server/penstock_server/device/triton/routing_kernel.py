"""The Triton kernel that sends rows to experts. A warp computes one row, so a row's bits depend on no other row.

Ranks are compared as integers of the same order, among which there is a number for "taken". So a row gets TOP_K
different experts whatever its logits are, NaN included, and no expert gets a row twice.
"""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**31))
OUTSIDE = tl.constexpr(-(2**31) + 1)  # key of experts outside of the best groups


@triton.jit
def _ordered(x):
    """float32 → int32 above OUTSIDE in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), OUTSIDE + 1)


@triton.jit
def _best_groups(
    ranked, is_expert, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUMS_TWO: tl.constexpr, WIDTH: tl.constexpr
):
    """Whether each group [WIDTH] is one of the TOP_GROUPS best. ranked: [WIDTH, experts of a group]"""
    group = tl.arange(0, WIDTH)
    ranked = tl.where(is_expert, ranked, float("-inf"))
    score = tl.max(ranked, 1)
    if SUMS_TWO:
        member = tl.arange(0, ranked.shape[1])[None, :]
        first = tl.min(tl.where(ranked == score[:, None], member, ranked.shape[1]), 1)
        score += tl.max(tl.where(member == first[:, None], float("-inf"), ranked), 1)
    key = tl.where(group < GROUPS, _ordered(score), TAKEN)
    for _ in range(TOP_GROUPS):
        best = tl.min(tl.where(key == tl.max(key, 0), group, WIDTH), 0)
        key = tl.where(group == best, TAKEN, key)
    return (key == TAKEN) & (group < GROUPS)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _shared_weight(x, gate, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """The sigmoid of a row's product with the gate."""
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, HIDDEN, WIDTH):
        mask = column < HIDDEN - start
        a = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
        total += a * tl.load(gate + start + column, mask=mask, other=0.0).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(-tl.sum(total, 0)))


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    weights,  # [num_rows, NUM_WEIGHTS] float32: of a row's experts, then of the shared expert if it is gated
    experts,  # [num_rows, TOP_K] int32
    counts,  # [MINE] int32: of the pairs of each expert on this rank; zero before
    pairs,  # [MINE, num_rows] int32: for each expert its pairs, in any order
    logits,  # [num_rows, EXPERTS]
    correction,  # [EXPERTS] float32, added to the scores for the choice only; or None
    x,  # [num_rows, HIDDEN], for the gate of the shared expert
    gate,  # [HIDDEN], or None
    num_rows,
    EXPERTS: tl.constexpr,
    FIRST: tl.constexpr,  # first of the experts on this rank
    MINE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    SCORING: tl.constexpr,  # see `RoutingSpec`, for all parameters until JITTER
    NORM_POWER: tl.constexpr,  # 0.0: none
    NORM_EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    JITTER: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,  # powers of two
    MEMBER_WIDTH: tl.constexpr,
    CHOICE_WIDTH: tl.constexpr,  # at least a warp's threads, so that one thread counts a pair
    HIDDEN_WIDTH: tl.constexpr,
):
    """Grid: rows, 1."""
    row = tl.program_id(0)
    group, member = tl.arange(0, GROUP_WIDTH)[:, None], tl.arange(0, MEMBER_WIDTH)[None, :]
    is_expert = (group < GROUPS) & (member < EXPERTS // GROUPS)
    expert = tl.where(is_expert, group * (EXPERTS // GROUPS) + member, EXPERTS)
    logit = tl.load(logits + row.to(tl.int64) * EXPERTS + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    score = logit
    if SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORING == "softmax":
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / _sum(score)
    ranked = score
    if correction is not None:
        ranked += tl.load(correction + expert, mask=is_expert, other=0.0)
    key = _ordered(ranked)
    if TOP_GROUPS < GROUPS:
        is_inside = _best_groups(ranked, is_expert, GROUPS, TOP_GROUPS, SUMS_TWO, GROUP_WIDTH)
        key = tl.where(is_inside[:, None], key, OUTSIDE)
    key = tl.where(is_expert, key, TAKEN)

    choice = tl.arange(0, CHOICE_WIDTH)
    chosen = tl.full([CHOICE_WIDTH], EXPERTS, tl.int32)
    weight = tl.zeros([CHOICE_WIDTH], tl.float32)
    for place in range(TOP_K):
        best = tl.min(tl.min(tl.where(key == tl.max(tl.max(key, 1), 0), expert, EXPERTS), 1), 0)
        its_score = _sum(tl.where(expert == best, score, 0.0))
        if SCORING == "sparsemixer":
            # Its softmax among the remaining experts that are close to it.
            distance = (its_score - logit) / tl.maximum(tl.abs(logit), its_score)
            is_close = (key != TAKEN) & ~(distance > 2 * JITTER)
            its_score = 1.0 / _sum(tl.where(is_close, tl.exp(logit - its_score), 0.0))
        chosen = tl.where(choice == place, best, chosen)
        weight = tl.where(choice == place, its_score, weight)
        key = tl.where(expert == best, TAKEN, key)

    is_choice = choice < TOP_K
    if SCORING == "softmax-chosen":
        most = tl.max(tl.where(is_choice, weight, float("-inf")), 0)
        weight = tl.where(is_choice, tl.exp(weight - most), 0.0)
        weight = weight / tl.sum(weight, 0)
    if NORM_POWER == 1.0:
        weight = weight / (tl.sum(tl.abs(weight), 0) + NORM_EPSILON)
    elif NORM_POWER > 0.0:
        power = tl.where(is_choice, tl.exp(NORM_POWER * tl.log(tl.abs(weight))), 0.0)
        weight = weight / (tl.exp(tl.log(tl.sum(power, 0)) / NORM_POWER) + NORM_EPSILON)
    tl.store(weights + row * NUM_WEIGHTS + choice, weight * SCALE, mask=is_choice)
    if gate is not None:
        shared = _shared_weight(x + row.to(tl.int64) * HIDDEN, gate, HIDDEN, HIDDEN_WIDTH)
        tl.store(weights + row * NUM_WEIGHTS + TOP_K, shared)
    tl.store(experts + row * TOP_K + choice, chosen, mask=is_choice)
    mine = chosen - FIRST
    is_mine = is_choice & (mine >= 0) & (mine < MINE)
    place = tl.atomic_add(counts + mine, 1, mask=is_mine, sem="relaxed")
    tl.store(pairs + mine * num_rows + place, row * TOP_K + choice, mask=is_mine)
