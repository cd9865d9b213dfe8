//! Downloads the adapters that clients add to the running server by their ids on the hub.

use std::convert::Infallible;
use std::path::Path;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use penstock_router::AdapterDownload;
use tokio::sync::mpsc;

use crate::flag::args::Args;
use crate::model::prepare;

/// Downloads at a time; later ones wait.
const MAX_DOWNLOADS: usize = 4;

/// Downloads what is asked for, each in a process of its own. Run it on the main thread, as `python::module` requires.
pub(crate) async fn run(mut asked: mpsc::Receiver<AdapterDownload>, python: &Path, args: &Args) -> Infallible {
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            Some(download) = asked.recv(), if running.len() < MAX_DOWNLOADS => {
                running.push(answer(download, python, args));
            }
            Some(()) = running.next(), if !running.is_empty() => {}
            // The router is gone.
            else => std::future::pending().await,
        }
    }
}

/// Ends the process early when the client is gone.
async fn answer(download: AdapterDownload, python: &Path, args: &Args) {
    let AdapterDownload { id, mut answer } = download;
    let result = tokio::select! {
        result = prepare::prepare_adapter(python, args, &id) => result,
        () = answer.closed() => return,
    };
    let result = result.map_err(|error| error.to_string());
    match &result {
        Ok(folder) => tracing::info!("the adapter {id} is in {}", folder.display()),
        Err(reason) => tracing::warn!("the adapter {id} cannot be downloaded: {reason}"),
    }
    // The client may have gone just now.
    let _ = answer.send(result);
}
