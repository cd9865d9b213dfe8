//! Serves until told to stop, then drains.

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

pub fn serve() {}
