//! Settings of one run of the server, which the start of a model, the start of a router and serving share.

use std::path::Path;

use crate::flag::args::Args;
use crate::flag::command_line::Parsed;
use crate::model::adapter::AdapterFlags;
use crate::resolve::Settings;

/// Settings of one run of the server.
#[derive(Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) parsed: &'a Parsed,
    pub(crate) settings: &'a Settings,
    pub(crate) adapters: &'a AdapterFlags,
    /// The interpreter of the worker processes.
    pub(crate) python: &'a Path,
}

impl<'a> Setup<'a> {
    pub(crate) fn args(&self) -> &'a Args {
        &self.parsed.args
    }
}
