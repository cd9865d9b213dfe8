//! The images of a prompt: read, fetched, encoded by the workers, and put into their places among the tokens.

use std::sync::Arc;

use super::context::Context;
use super::deadline::Deadlines;
use super::error::GenerationError;
use super::image::{self, GivenImage, ImageSource};
use super::parameter::Checked;
use super::validation::ValidationError;
use crate::sequence::{EncodedImage, Image, ImageSpan};

impl Context {
    /// Checks the images of a prompt.
    pub(super) fn read_images(&self, sources: &[ImageSource]) -> Result<Vec<GivenImage>, ValidationError> {
        match (sources.first(), self.image_input()) {
            (Some(first), None) => Err(image::unreadable(first)),
            _ => image::read(sources, self.fetcher.is_some()),
        }
    }

    /// Fetches and encodes the images of a prompt, after a check that it has a place for each. Returns them with what the workers made of them.
    pub(super) async fn encode_images(
        &self,
        token_ids: &[u32],
        images: Vec<GivenImage>,
        deadlines: Deadlines,
    ) -> Result<(Vec<Image>, Vec<EncodedImage>), GenerationError> {
        image::check_places(token_ids, self.image_input(), images.len())?;
        let fetch = image::fetch(images, self.fetcher.as_ref());
        let images = self.in_time(deadlines, async { Ok(fetch.await?) }).await?;
        let encode = self.generator.encode_images(images.clone());
        let encoded = self.in_time(deadlines, async { Ok(encode.await?) }).await?;
        Ok((images, encoded))
    }

    /// Encodes the images of a prompt, and puts their tokens into their places.
    pub(super) async fn place_images(
        &self,
        token_ids: Vec<u32>,
        images: Vec<GivenImage>,
        checked: &Checked,
        deadlines: Deadlines,
    ) -> Result<(Vec<u32>, Arc<[ImageSpan]>), GenerationError> {
        let Some(input) = self.image_input().filter(|_| !images.is_empty()) else {
            return Ok((token_ids, Arc::default()));
        };
        if checked.truncate.is_some() {
            return Err(ValidationError::TruncateImages.into());
        }
        let (images, encoded) = self.encode_images(&token_ids, images, deadlines).await?;
        let (token_ids, spans) = image::expand(&token_ids, input, images, &encoded);
        image::check_room(&spans, input)?;
        Ok((token_ids, spans))
    }
}
