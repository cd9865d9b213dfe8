//! Content that a client may write as one string or as a list of typed parts.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use crate::generation::ValidationError;

/// A string, or a list of parts.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
pub(super) enum Content<P> {
    Text(String),
    Parts(Vec<P>),
}

/// Written by hand because serde's untagged enums lose where in the list an error is.
impl<'de, P: Deserialize<'de>> Deserialize<'de> for Content<P> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor<P>(PhantomData<P>);

        impl<'de, P: Deserialize<'de>> Visitor<'de> for ContentVisitor<P> {
            type Value = Content<P>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or a list")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Content<P>, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Content<P>, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content<P>, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(parts)).map(Content::Parts)
            }
        }

        deserializer.deserialize_any(ContentVisitor(PhantomData))
    }
}

/// Values of `detail`, how exactly a model of OpenAI sees an image. Here they have no effect.
const DETAILS: [&str; 4] = ["auto", "low", "high", "original"];

/// Checks the `detail` of an image. `path`: that of the image.
pub(super) fn check_detail(detail: Option<&str>, path: &str) -> Result<(), ValidationError> {
    match detail {
        Some(given) if !DETAILS.contains(&given) => Err(ValidationError::Item {
            path: format!("{path}.detail"),
            problem: format!(
                "must be `auto`, `low`, `high` or `original`. Given: {:?}",
                given.chars().take(40).collect::<String>()
            ),
        }),
        _ => Ok(()),
    }
}
