//! How fields are deserialized in every dialect.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
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

/// Whether a field has an effect: null, false, zero and empty values count as absent.
pub(super) fn is_given(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Bool(true) | Value::String(_)) => true,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(fields)) => !fields.is_empty(),
    }
}

/// Deserializes `null` as the default.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Deserializes a required integer like [`integer`].
pub(super) fn required_integer<'de, D: Deserializer<'de>, T: TryFrom<u64> + TryFrom<i64>>(
    deserializer: D,
) -> Result<T, D::Error> {
    integer(deserializer)?.ok_or_else(|| D::Error::invalid_type(Unexpected::Unit, &std::any::type_name::<T>()))
}

/// Deserializes an optional integer. Accepts `2.0`, because JSON does not distinguish it from `2`.
pub(super) fn integer<'de, D: Deserializer<'de>, T: TryFrom<u64> + TryFrom<i64>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    struct Integer<T>(T);

    impl<'de, T: TryFrom<u64> + TryFrom<i64>> Deserialize<'de> for Integer<T> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_any(IntegerVisitor(PhantomData)).map(Self)
        }
    }

    struct IntegerVisitor<T>(PhantomData<T>);

    impl<T: TryFrom<u64> + TryFrom<i64>> Visitor<'_> for IntegerVisitor<T> {
        type Value = T;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str(std::any::type_name::<T>())
        }

        fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
            T::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
        }

        fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
            T::try_from(value).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
        }

        fn visit_f64<E: Error>(self, value: f64) -> Result<T, E> {
            let is_exact = value.fract() == 0.0 && value.abs() < 9e15;
            let integer = is_exact.then_some(value as i64).and_then(|value| T::try_from(value).ok());
            integer.ok_or_else(|| E::invalid_type(Unexpected::Float(value), &self))
        }
    }

    Ok(Option::deserialize(deserializer)?.map(|Integer(value)| value))
}
