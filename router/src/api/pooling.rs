//! What all dialects of embeddings and scores have in common.

use serde::Deserialize;
use utoipa::ToSchema;

use super::openai::OneOrMany;
use crate::generation::{PoolingInput, ValidationError};
use crate::limits::RequestLimits;
use crate::sequence::{Matryoshka, Pooling};
use crate::text::Input;

/// What embeddings are made of.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string, a list of strings, a list of token ids, or a list of such lists")]
pub(super) enum EmbeddingInputs {
    Texts(OneOrMany),
    TokenIds(Vec<u32>),
    TokenIdLists(Vec<Vec<u32>>),
}

impl EmbeddingInputs {
    /// At least one input, none of which is empty. `prefix`: goes before each text.
    pub(super) fn into_vec(self, prefix: &str, limits: &RequestLimits) -> Result<Vec<PoolingInput>, ValidationError> {
        let texts = match self {
            Self::Texts(texts) => texts.into_vec(),
            Self::TokenIds(ids) => return Self::TokenIdLists(vec![ids]).into_vec(prefix, limits),
            Self::TokenIdLists(lists) => {
                check_inputs(lists.len(), limits)?;
                return Ok(lists.into_iter().map(PoolingInput::TokenIds).collect());
            }
        };
        if texts.iter().any(String::is_empty) {
            return Err(ValidationError::EmptyInput);
        }
        check_inputs(texts.len(), limits)?;
        let input = |text| PoolingInput::Text(Input::Text(format!("{prefix}{text}").into()));
        Ok(texts.into_iter().map(input).collect())
    }
}

/// Refuses a request without inputs, or with more than `--max-client-batch-size`.
pub(super) fn check_inputs(given: usize, limits: &RequestLimits) -> Result<(), ValidationError> {
    let max = limits.max_client_batch_size.min(limits.max_concurrent_requests);
    match given {
        0 => Err(ValidationError::EmptyInput),
        given if given > max => Err(ValidationError::NumInputs { max, given }),
        _ => Ok(()),
    }
}

/// Refuses vectors of a length that the model was not trained for.
pub(crate) fn check_dimensions(dimensions: Option<usize>, pooling: &Pooling) -> Result<(), ValidationError> {
    let whole = pooling.num_dimensions;
    let Some(given) = dimensions.filter(|&given| given != whole) else { return Ok(()) };
    let allowed = match &pooling.matryoshka {
        Matryoshka::Any if (1..whole).contains(&given) => return Ok(()),
        Matryoshka::Of(allowed) if given < whole && allowed.contains(&given) => return Ok(()),
        Matryoshka::Any => format!(">= 1 and <= {whole}"),
        Matryoshka::Of(allowed) => format!("{whole} or one of {allowed:?}"),
        Matryoshka::No => format!(
            "{whole}, because the model's config.json does not say that shorter vectors are meaningful (is_matryoshka)"
        ),
    };
    Err(ValidationError::Dimensions { allowed, given })
}

/// The first `dimensions` numbers of each vector, divided by their length if `normalizes`.
pub(crate) fn finish(vectors: &mut [Vec<f32>], dimensions: Option<usize>, normalizes: bool) {
    for vector in vectors {
        vector.truncate(dimensions.unwrap_or(usize::MAX));
        if normalizes {
            let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::Task;

    #[test]
    fn a_vector_is_cut_and_then_normalized() {
        let mut vectors = vec![vec![3.0, 4.0, 12.0], vec![0.0, 0.0, 5.0]];
        finish(&mut vectors, Some(2), true);
        assert_eq!(vectors, [[0.6, 0.8], [0.0, 0.0]]);
        finish(&mut vectors, None, false);
        assert_eq!(vectors, [[0.6, 0.8], [0.0, 0.0]]);
    }

    #[test]
    fn only_matryoshka_models_have_shorter_vectors() {
        let check = |matryoshka: Matryoshka, given: usize| {
            let pooling = Pooling {
                task: Task::Embed,
                num_dimensions: 8,
                is_normalized: true,
                reads_all_outputs: false,
                is_encoder: false,
                has_token_types: false,
                matryoshka,
            };
            check_dimensions(Some(given), &pooling).map_err(|error| error.to_string())
        };
        assert_eq!(check(Matryoshka::No, 8), Ok(()));
        let refused = check(Matryoshka::No, 4).unwrap_err();
        assert!(refused.starts_with("`dimensions` must be 8, because") && refused.ends_with("Given: 4"), "{refused}");
        assert_eq!(check(Matryoshka::Any, 1), Ok(()));
        assert_eq!(check(Matryoshka::Any, 0).unwrap_err(), "`dimensions` must be >= 1 and <= 8. Given: 0");
        assert_eq!(check(Matryoshka::Any, 9).unwrap_err(), "`dimensions` must be >= 1 and <= 8. Given: 9");
        assert_eq!(check(Matryoshka::Of(vec![2, 4]), 4), Ok(()));
        assert_eq!(
            check(Matryoshka::Of(vec![2, 4]), 3).unwrap_err(),
            "`dimensions` must be 8 or one of [2, 4]. Given: 3"
        );
    }
}
