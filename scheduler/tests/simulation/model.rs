//! A fake language model: the next token is a function of every token before it, so one lost, repeated or foreign token
//! changes all that follow.

use std::collections::HashSet;

use penstock_scheduler::{ContentSalt, FinishReason, ImageGroup, TokenId};

pub const VOCAB_TOKENS: u64 = 40;
pub const STOP_TOKEN: TokenId = 7;

/// Digest of a prefix that ends in `token_id`, given the digest of the prefix before it.
pub fn extend(digest: u64, token_id: TokenId) -> u64 {
    let mixed = (digest ^ u64::from(token_id)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 29)
}

/// Positions of a prompt at which it has content that its tokens do not show, and which of a few contents it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Images(pub [Option<(u32, u64)>; 2]);

impl Images {
    /// The content at this position.
    pub fn at(&self, position: usize) -> impl Iterator<Item = u64> {
        self.0.iter().flatten().filter(move |(at, _)| *at as usize == position).map(|(_, picture)| *picture)
    }

    /// The digest with the token at this position, and the content there.
    pub fn extend(&self, digest: u64, position: usize, token_id: TokenId) -> u64 {
        extend(self.at(position).fold(digest, |digest, picture| extend(digest, 1000 + picture as TokenId)), token_id)
    }

    /// What the scheduler is told of them.
    pub fn salts(&self) -> Vec<ContentSalt> {
        let mut salts: Vec<_> = self.0.iter().flatten().map(|&(offset, salt)| ContentSalt { offset, salt }).collect();
        salts.sort_by_key(|salt| salt.offset);
        salts
    }

    /// The same as groups that take room: each content is one, and the second is larger.
    pub fn groups(&self) -> Vec<ImageGroup> {
        let group = |&(_, picture): &(u32, u64)| ImageGroup { key: picture, num_bytes: 2 + 3 * picture };
        let mut groups: Vec<_> = self.0.iter().flatten().map(group).collect();
        groups.dedup();
        groups
    }

    /// The images within the first `num_tokens` positions.
    pub fn within(self, num_tokens: usize) -> Self {
        Self(self.0.map(|image| image.filter(|(position, _)| (*position as usize) < num_tokens)))
    }
}

/// The bytes of these groups, of which equal ones take room once.
pub fn num_image_bytes(groups: impl Iterator<Item = ImageGroup>) -> u64 {
    groups.collect::<HashSet<_>>().iter().map(|group| group.num_bytes).sum()
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
    images: Images,
    max_new_tokens: u32,
    stop_token_ids: &[TokenId],
    fail_position: Option<u32>,
) -> (Vec<TokenId>, End) {
    let add = |digest, (position, token_id): (usize, &TokenId)| images.extend(digest, position, *token_id);
    let mut digest = prompt.iter().enumerate().fold(ROOT, add);
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
