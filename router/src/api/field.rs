//! How fields are deserialized in every dialect.

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_path_to_error::Track;

/// Deserializes with `read` and puts the field's path before its error: a flattened struct is read from a buffer in
/// which serde does not track the path.
pub(super) fn named<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    read: impl FnOnce(serde_path_to_error::Deserializer<'_, '_, D>) -> Result<T, D::Error>,
) -> Result<T, D::Error> {
    let mut track = Track::new();
    read(serde_path_to_error::Deserializer::new(deserializer, &mut track)).map_err(|error| {
        let path = track.path();
        if path.iter().next().is_some() { D::Error::custom(format!("{path}: {error}")) } else { error }
    })
}

/// Deserializes `null` as the default.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
