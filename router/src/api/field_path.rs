//! Names the field that is wrong where serde forgets it: a flattened struct is read from a buffer that knows no path.

use serde::Deserializer;
use serde::de::Error;
use serde_path_to_error::Track;

/// Reads by `read`; an error begins with the path of the field that it is about.
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
