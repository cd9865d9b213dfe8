//! The model's folder and the folders of its adapters, prepared as the flags say.

pub(crate) mod adapter;
pub(crate) mod adapter_download;
pub(crate) mod file;
pub(crate) mod fingerprint;
pub(crate) mod folder;
pub(crate) mod generation_config;
pub(crate) mod local;
pub(crate) mod prefetch;
pub(crate) mod prepare;
pub(crate) mod rope_scaling;
