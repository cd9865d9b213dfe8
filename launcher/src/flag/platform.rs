//! Defaults that SageMaker and Vertex AI give a container in their own environment variables.

use clap::Command;
use penstock_router::config::VertexRoutes;

/// SageMaker's variables and the settings they are for.
const SAGEMAKER: [(&str, &str); 5] = [
    ("HF_MODEL_ID", "model_id"),
    ("HF_MODEL_REVISION", "revision"),
    ("SM_NUM_GPUS", "num_shard"),
    ("HF_MODEL_QUANTIZE", "quantize"),
    ("HF_MODEL_TRUST_REMOTE_CODE", "trust_remote_code"),
];
/// Each of these variables marks a SageMaker container, which must listen on port 8080.
const SAGEMAKER_MARKS: [&str; 5] =
    ["SM_NUM_GPUS", "SM_HOSTS", "SM_CURRENT_HOST", "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_REGION"];
const SAGEMAKER_PORT: &str = "8080";

/// A setting's default on this platform.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Default {
    id: &'static str,
    value: String,
    origin: &'static str,
}

/// The platform that this container runs on, as far as its variables tell.
#[derive(Clone, Debug, std::default::Default, PartialEq, Eq)]
pub(crate) struct Platform {
    defaults: Vec<Default>,
    /// The platform's variable for the port. It overrides `PORT`, which images set for all platforms.
    port_variable: Option<&'static str>,
    pub(crate) vertex_routes: VertexRoutes,
}

impl Platform {
    /// Empty variables count as unset. says_serve: the command line begins with the word that SageMaker gives a container.
    pub(crate) fn detect(says_serve: bool, get_env: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| get_env(name).filter(|value| !value.is_empty());
        let given = |(origin, id): (&'static str, &'static str)| Some(Default { id, value: get(origin)?, origin });
        let mut platform = Self {
            defaults: SAGEMAKER.into_iter().filter_map(given).collect(),
            port_variable: None,
            vertex_routes: VertexRoutes { predict: get("AIP_PREDICT_ROUTE"), health: get("AIP_HEALTH_ROUTE") },
        };
        let is_sagemaker =
            SAGEMAKER_MARKS.into_iter().any(|name| get(name).is_some()) || (says_serve && get("HF_MODEL_ID").is_some());
        if get("AIP_HTTP_PORT").is_some() {
            platform.port_variable = Some("AIP_HTTP_PORT");
        } else if is_sagemaker {
            platform.port_variable = Some("SAGEMAKER_BIND_TO_PORT");
            let default = Default { id: "port", value: SAGEMAKER_PORT.to_owned(), origin: "SageMaker's convention" };
            platform.defaults.push(default);
        }
        platform
    }

    /// Sets the platform's defaults.
    pub(crate) fn apply(&self, mut command: Command) -> Command {
        if let Some(variable) = self.port_variable {
            command = command.mut_arg("port", |arg| arg.env(variable));
        }
        for Default { id, value, .. } in &self.defaults {
            command = command.mut_arg(*id, |arg| arg.default_value(value.clone()));
        }
        command
    }

    /// Origin of a setting's default, if the platform gave it.
    pub(crate) fn origin(&self, id: &str) -> Option<&'static str> {
        self.defaults.iter().find(|default| default.id == id).map(|default| default.origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(variables: &[(&str, &str)]) -> Platform {
        detect_with(false, variables)
    }

    fn detect_with(says_serve: bool, variables: &[(&str, &str)]) -> Platform {
        Platform::detect(says_serve, |name| variables.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned()))
    }

    #[test]
    fn a_machine_without_platform_variables_has_no_defaults() {
        assert_eq!(detect(&[("MODEL_ID", "a/b"), ("HF_MODEL_ID", "")]), Platform::default());
    }

    #[test]
    fn port_8080_is_the_default_only_on_sagemaker() {
        assert_eq!(detect(&[("HF_MODEL_ID", "a/b")]).origin("port"), None);
        assert_eq!(detect(&[("SM_NUM_GPUS", "1")]).origin("port"), Some("SageMaker's convention"));
    }

    #[test]
    fn the_word_serve_with_a_model_of_sagemaker_is_sagemaker() {
        assert_eq!(detect_with(true, &[]), Platform::default());
        let platform = detect_with(true, &[("HF_MODEL_ID", "/opt/ml/model")]);
        assert_eq!(platform.origin("port"), Some("SageMaker's convention"));
        assert_eq!(platform.port_variable, Some("SAGEMAKER_BIND_TO_PORT"));
    }

    #[test]
    fn vertex_gives_a_port_and_routes() {
        let platform = detect(&[("AIP_HTTP_PORT", "9000"), ("AIP_PREDICT_ROUTE", "/predict"), ("SM_HOSTS", "a")]);
        assert_eq!(platform.port_variable, Some("AIP_HTTP_PORT"));
        let routes = VertexRoutes { predict: Some("/predict".to_owned()), health: None };
        assert_eq!(platform.vertex_routes, routes);
    }
}
