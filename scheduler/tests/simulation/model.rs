//! A fake language model: the next token is a function of every token before it, so one lost, repeated or foreign token
//! changes all that follow.

use penstock_scheduler::{FinishReason, TokenId};

pub const VOCAB_TOKENS: u64 = 40;
pub const STOP_TOKEN: TokenId = 7;

/// Digest of a prefix that ends in `token_id`, given the digest of the prefix before it.
pub fn extend(digest: u64, token_id: TokenId) -> u64 {
    let mixed = (digest ^ u64::from(token_id)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 29)
}

pub fn sample(digest: u64) -> TokenId {
    ((digest >> 7) % VOCAB_TOKENS) as TokenId
}

/// Digest of the empty prefix.
pub const ROOT: u64 = 0;

/// The first `num_tokens` tokens of the text `nonce`.
pub fn text(nonce: u64, num_tokens: usize) -> impl Iterator<Item = TokenId> {
    (0..num_tokens as TokenId).map(move |i| sample(extend(extend(1, nonce as TokenId), i)))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Finished(FinishReason),
    Failed,
}

impl End {
    pub fn name(self) -> &'static str {
        match self {
            End::Finished(FinishReason::Length) => "finished by length",
            End::Finished(FinishReason::StopToken) => "finished by a stop token",
            End::Failed => "failed",
        }
    }
}

/// The tokens and the end of a sequence. Computing position `fail_position` fails.
pub fn expected(
    prompt: &[TokenId],
    max_new_tokens: u32,
    stop_token_ids: &[TokenId],
    fail_position: Option<u32>,
) -> (Vec<TokenId>, End) {
    let mut digest = prompt.iter().fold(ROOT, |digest, token_id| extend(digest, *token_id));
    let mut tokens = Vec::new();
    loop {
        let num_computed_tokens = prompt.len() + tokens.len();
        if fail_position.is_some_and(|position| (position as usize) < num_computed_tokens) {
            return (tokens, End::Failed);
        }
        let token_id = sample(digest);
        tokens.push(token_id);
        if stop_token_ids.contains(&token_id) {
            return (tokens, End::Finished(FinishReason::StopToken));
        }
        if tokens.len() == max_new_tokens as usize {
            return (tokens, End::Finished(FinishReason::Length));
        }
        digest = extend(digest, token_id);
    }
}
