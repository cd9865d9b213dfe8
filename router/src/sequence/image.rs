//! Images in prompts.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use penstock_scheduler::ImageGroup;
use sha2::{Digest, Sha256};

/// An image file. Clones share it.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    hash: [u8; 32],
    data: Arc<[u8]>,
}

/// An image among the tokens of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// The image.
    pub image: Image,
    /// Prompt tokens before those that stand for the image.
    pub offset: u32,
    /// Tokens that stand for the image.
    pub num_tokens: u32,
    /// Whether they attend to each other, so that no step ends inside of them.
    pub is_whole: bool,
    /// What it takes of `ImageInput::max_bytes`.
    pub num_bytes: u64,
}

impl ImageSpan {
    /// Its tokens among those of the prompt.
    pub(crate) fn tokens(&self) -> std::ops::Range<u32> {
        self.offset..self.offset + self.num_tokens
    }
}

/// The images of a prompt as the scheduler counts them: those next to each other are one group. `keys` make their keys.
pub(crate) fn groups(spans: &[ImageSpan], keys: &impl BuildHasher) -> Arc<[ImageGroup]> {
    let group = |adjacent: &[ImageSpan]| {
        let hashes: Vec<_> = adjacent.iter().map(|span| span.image.hash()).collect();
        ImageGroup { key: keys.hash_one(hashes), num_bytes: adjacent.iter().map(|span| span.num_bytes).sum() }
    };
    let mut groups: Vec<_> = spans.chunk_by(|one, next| one.tokens().end == next.offset).map(group).collect();
    groups.sort_unstable_by_key(|group| group.key);
    groups.dedup();
    groups.into()
}

/// What the workers make of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedImage {
    /// The tokens that stand for it.
    pub token_ids: Vec<u32>,
    /// What it takes of `ImageInput::max_bytes`.
    pub num_bytes: u64,
}

/// How a model's prompts have images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageInput {
    /// In an encoded prompt, each token of this id stands for an image, and is replaced by the tokens of that image.
    pub placeholder_id: u32,
    /// Text that is encoded to one `placeholder_id`, and maybe to tokens around it.
    pub placeholder: String,
    /// Not empty: what chat templates write for an image; `placeholder` replaces it.
    pub template_text: String,
    /// Whether the tokens of an image attend to each other.
    pub is_whole: bool,
    /// Whether all tokens of a prompt attend to each other.
    pub is_prompt_whole: bool,
    /// In prompts without a chat template: text after the last image.
    pub text_prefix: String,
    /// In prompts without a chat template: text at the end.
    pub text_suffix: String,
    /// Bytes that the images of the sequences that a worker knows may take.
    pub max_bytes: u64,
    /// Whether sequences with images that name no adapter have the model's own, so that they share no cached prefix with text.
    pub has_adapter: bool,
}

impl ImageInput {
    /// What a chat template writes for an image.
    pub(crate) fn text_in_template(&self) -> &str {
        if self.template_text.is_empty() { &self.placeholder } else { &self.template_text }
    }
}

/// Why images cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// An image, named by its number, cannot be read, or does not fit.
    #[error("{0}")]
    Unusable(String),
    /// Too many images wait for the workers.
    #[error("{0}")]
    Overloaded(String),
    /// The workers stopped, or do not answer.
    #[error("the model workers stopped: {0}")]
    Worker(String),
}

impl Image {
    /// Any file; the workers find out whether it is an image.
    pub fn new(data: Vec<u8>) -> Self {
        Self { hash: Sha256::digest(&data).into(), data: data.into() }
    }

    /// SHA-256 of the data.
    pub fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// The file.
    pub fn data(&self) -> &[u8] {
        &self.data
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Image({} bytes)", self.data.len())
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use super::*;

    #[test]
    fn images_next_to_each_other_are_a_group_which_counts_once() {
        let span = |name: &str, offset| ImageSpan {
            image: Image::new(name.as_bytes().to_vec()),
            offset,
            num_tokens: 2,
            is_whole: false,
            num_bytes: name.len() as u64,
        };
        let keys = BuildHasherDefault::<DefaultHasher>::default();
        let bytes = |spans: &[ImageSpan]| {
            let mut bytes: Vec<_> = groups(spans, &keys).iter().map(|group| group.num_bytes).collect();
            bytes.sort_unstable();
            bytes
        };
        assert_eq!(bytes(&[]), [0; 0]);
        assert_eq!(bytes(&[span("a", 0), span("bb", 2), span("a", 5)]), [1, 3]);
        assert_eq!(bytes(&[span("a", 0), span("bb", 2), span("a", 5), span("bb", 7)]), [3]);
        let key = |spans: &[ImageSpan]| groups(spans, &keys)[0].key;
        assert_ne!(key(&[span("a", 0), span("b", 2)]), key(&[span("b", 0), span("a", 2)]));
        assert_eq!(key(&[span("a", 0)]), key(&[span("a", 7)]));
    }
}
