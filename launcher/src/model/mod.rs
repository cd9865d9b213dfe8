//! The model's folder and the folders of its adapters, prepared as the flags say.

pub(crate) mod adapter;
pub(crate) mod adapter_download;
pub(crate) mod fingerprint;
pub(crate) mod generation_config;
pub(crate) mod model_folder;
pub(crate) mod prefetch;
pub(crate) mod quantize;
pub(crate) mod rope_scaling;
pub(crate) mod weights;
