//! `penstock route`: from settings to engines on other servers. Nothing but the tokenizer and the configuration is prepared here.

pub(crate) mod replica_file;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::join_all;
use penstock_router::engine::RemoteOptions;
use penstock_router::remote::{Access, Properties, Remote, RemoteError, RequestLimits, ServerDescription, UrlError};
use penstock_router::replica::Replicas;

use crate::flag::args::Args;
use crate::model::fingerprint;
use crate::model::local::{LocalModel, LocalModelError};
use crate::phase::Phases;
use crate::resolve::{ResolveError, SequenceLimits};
use crate::route::replica_file::{Follower, Servers};
use crate::serve::Started;
use crate::setup::Setup;

/// Interval between two attempts to reach a first server.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Errors of the servers behind a router.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RouteError {
    #[error("--replica: {0}")]
    Url(#[from] UrlError),
    #[error("--replica is given {0} times, must be at most 1024 times")]
    TooMany(usize),
    #[error("--replica {0} is given twice")]
    Twice(String),
    #[error("replica {url}: {source}")]
    Refused { url: String, source: RemoteError },
    #[error(
        "the tokenizer here is {ours}, that of the servers is {theirs}; give --model-id and --revision as on the servers"
    )]
    Tokenizer { ours: String, theirs: String },
    #[error("cannot read the tokenizer: {0}")]
    Read(#[from] std::io::Error),
    #[error("--replica-file {}: {reason}", .path.display())]
    File { path: PathBuf, reason: String },
}

/// Errors of a router's start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Files(#[from] LocalModelError),
    #[error(transparent)]
    Servers(#[from] RouteError),
    #[error(transparent)]
    Limits(#[from] ResolveError),
}

/// Checks the URLs before anything is started.
pub(crate) fn servers(args: &Args, access: &Access) -> Result<Vec<Remote>, RouteError> {
    if let Some(path) = &args.replica_file {
        return Ok(servers_of_file(path, access)?.remotes);
    }
    if args.replica.len() > Replicas::MAX_ENGINES {
        return Err(RouteError::TooMany(args.replica.len()));
    }
    let remotes: Vec<_> = args.replica.iter().map(|url| Remote::new(url, access)).collect::<Result<_, _>>()?;
    let mut urls = HashSet::new();
    match remotes.iter().find(|remote| !urls.insert(remote.url())) {
        Some(repeated) => Err(RouteError::Twice(repeated.url().to_owned())),
        None => Ok(remotes),
    }
}

/// Fails without a server that can be used.
fn servers_of_file(path: &Path, access: &Access) -> Result<Servers, RouteError> {
    let error = |reason| RouteError::File { path: path.to_owned(), reason };
    let text = replica_file::read(path).map_err(|cause| error(format!("cannot read it: {cause}")))?;
    let servers = replica_file::parse(&text, access);
    match servers.remotes.is_empty() {
        true => Err(error(format!("it has no server that can be used; {}", servers.refusals.join("; ")))),
        false => Ok(servers),
    }
}

/// Waits until a server can be reached. Dropping the future stops that.
pub(crate) async fn start(
    setup: Setup<'_>,
    mut servers: Vec<Remote>,
    access: Option<Access>,
) -> Result<Started, StartError> {
    let (args, mut phases) = (setup.args(), Phases::default());
    let local = LocalModel::prepare(args, setup.adapters, setup.python, &mut phases).await?;
    let start = Instant::now();
    let tokenizer = fingerprint::tokenizer(&local.folder.path).map_err(RouteError::Read)?;
    let file = args.replica_file.as_deref().zip(access.as_ref());
    let described = match file {
        Some((path, access)) => {
            describe_file(path, access, &mut servers, |server| check(args, &tokenizer, server)).await
        }
        None => describe(&servers, |server| check_release(&server.properties)).await?,
    };
    phases.add_since("find servers", start);
    // A list that may change has servers that do not fit: they are refused alone, here or by their engines.
    let described = equal_to_first(described, file.is_some())?;
    let first = &described[0].1;
    check_tokenizer(&tokenizer, first)?;
    let limits = limits(args, &described, servers.len())?;
    let max_image_bytes = described.iter().map(|(_, server)| server.model.max_image_bytes()).min().unwrap_or(0);
    let mut model = first.model.clone();
    model.image_input.iter_mut().for_each(|input| input.max_bytes = max_image_bytes);
    let num_blocks = servers.len() * first.num_blocks as usize;
    let start = Instant::now();
    let options = |remote| remote_options(args, remote, &described, &limits, max_image_bytes);
    let remotes: Vec<_> = servers.into_iter().map(options).collect();
    let any = remotes.first().cloned();
    let replicas = Replicas::connect(remotes, first);
    replicas.ready().await;
    phases.add_since("connect", start);
    let follower = args.replica_file.clone().zip(access).zip(any).map(|((path, access), options)| {
        let follower = Follower { path, access, options, replicas: replicas.clone() };
        async move { follower.run().await }.boxed()
    });
    Ok(Started {
        follower,
        replicas,
        supervisors: Vec::new(),
        local: local.with_embeddings(model.vocab_size),
        model,
        limits,
        num_blocks,
        phases,
        description: None,
    })
}

/// The servers that compute the same tokens as the first. With `drops_others`, the others are left out; without it, one is an error.
fn equal_to_first(
    mut described: Vec<(String, ServerDescription)>,
    drops_others: bool,
) -> Result<Vec<(String, ServerDescription)>, RouteError> {
    let properties = described.first().expect("invariant: there is a server").1.properties.clone();
    if drops_others {
        described.retain(|(_, server)| properties.check(&server.properties).is_ok());
    }
    described.iter().try_for_each(|(url, server)| {
        properties.check(&server.properties).map_err(|source| RouteError::Refused { url: url.clone(), source })
    })?;
    Ok(described)
}

fn remote_options(
    args: &Args,
    remote: Remote,
    described: &[(String, ServerDescription)],
    limits: &SequenceLimits,
    max_image_bytes: u64,
) -> RemoteOptions {
    RemoteOptions {
        remote,
        properties: described[0].1.properties.clone(),
        limits: RequestLimits {
            max_input_tokens: limits.max_input_tokens,
            max_total_tokens: limits.max_total_tokens,
            max_new_tokens: limits.max_new_tokens,
            max_image_bytes,
        },
        timeout: Duration::from_secs(args.replica_timeout),
        step_deadline: described.iter().map(|(_, server)| server.step_deadline).max().unwrap_or_default(),
    }
}

/// Descriptions of the servers of a fixed list that can be reached and pass `check`; at least one. A server that refuses this router is
/// an error.
async fn describe(
    servers: &[Remote],
    check: impl Fn(&ServerDescription) -> Result<(), String>,
) -> Result<Vec<(String, ServerDescription)>, RouteError> {
    loop {
        let mut described = Vec::new();
        for (url, answer) in ask(servers).await {
            let reason = match answer {
                Err(source @ (RemoteError::Lost(_) | RemoteError::Version { .. })) => source.to_string(),
                Err(source) => return Err(RouteError::Refused { url, source }),
                Ok(description) => match check(&description) {
                    Ok(()) => {
                        described.push((url, description));
                        continue;
                    }
                    Err(reason) => reason,
                },
            };
            tracing::warn!("replica {url}: {reason}");
        }
        if !described.is_empty() {
            return Ok(described);
        }
        tracing::warn!("no replica can be used yet; trying again");
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Descriptions of the servers of the file that can be reached and pass `check`; at least one. Until there is one, the file is read again, and
/// `servers` is what it has.
async fn describe_file(
    path: &Path,
    access: &Access,
    servers: &mut Vec<Remote>,
    check: impl Fn(&ServerDescription) -> Result<(), String>,
) -> Vec<(String, ServerDescription)> {
    let mut logged = Vec::new();
    loop {
        let refusals = match servers_of_file(path, access) {
            Ok(read) => {
                *servers = read.remotes;
                read.refusals.iter().map(|refusal| format!("--replica-file {}: {refusal}", path.display())).collect()
            }
            Err(error) => vec![error.to_string()],
        };
        if refusals != logged {
            refusals.iter().for_each(|refusal| tracing::warn!("{refusal}"));
            logged = refusals;
        }
        let mut described = Vec::new();
        for (url, answer) in ask(servers).await {
            let checked = answer.map_err(|error| error.to_string()).and_then(|server| check(&server).map(|()| server));
            match checked {
                Ok(server) => described.push((url, server)),
                Err(reason) => tracing::warn!("replica {url}: {reason}"),
            }
        }
        if !described.is_empty() {
            return described;
        }
        tracing::warn!("no replica can be used yet; trying again");
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Asks all servers at once.
async fn ask(servers: &[Remote]) -> Vec<(String, Result<ServerDescription, RemoteError>)> {
    join_all(servers.iter().map(|remote| async move { (remote.url().to_owned(), remote.describe().await) })).await
}

/// Fails if the server is of another release, if its tokenizer is another one than `tokenizer`, or if it accepts less than the flags say.
fn check(args: &Args, tokenizer: &str, server: &ServerDescription) -> Result<(), String> {
    check_release(&server.properties)?;
    check_tokenizer(tokenizer, server).map_err(|error| error.to_string())?;
    let given = RequestLimits {
        max_input_tokens: args.max_input_tokens.or(args.max_input_length).unwrap_or(0),
        max_total_tokens: args.max_total_tokens.unwrap_or(0),
        max_new_tokens: None,
        max_image_bytes: 0,
    };
    given.check(server).map_err(|error| error.to_string())
}

/// While servers are updated one after the other, a router uses those of its own release.
fn check_release(server: &Properties) -> Result<(), String> {
    let ours = env!("CARGO_PKG_VERSION");
    match property(server, fingerprint::VERSION).filter(|theirs| *theirs != ours) {
        Some(theirs) => Err(format!("its release of penstock is {theirs}, that of this router is {ours}")),
        None => Ok(()),
    }
}

fn property<'a>(server: &'a Properties, wanted: &str) -> Option<&'a str> {
    server.0.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str())
}

fn check_tokenizer(ours: &str, server: &ServerDescription) -> Result<(), RouteError> {
    match property(&server.properties, fingerprint::TOKENIZER).filter(|theirs| *theirs != ours) {
        Some(theirs) => Err(RouteError::Tokenizer { ours: ours.to_owned(), theirs: theirs.to_owned() }),
        None => Ok(()),
    }
}

/// Limits that every server accepts, or less if flags say so.
fn limits(
    args: &Args,
    described: &[(String, ServerDescription)],
    num_servers: usize,
) -> Result<SequenceLimits, ResolveError> {
    let min = |limit: fn(&ServerDescription) -> u32| described.iter().map(|(_, it)| limit(it)).min().unwrap_or(0);
    let allowed = min(|server| server.max_total_tokens);
    let max_total_tokens = args.max_total_tokens.unwrap_or(allowed);
    if max_total_tokens > allowed {
        return Err(ResolveError::BeyondModel { given: max_total_tokens, allowed });
    }
    let allowed = min(|server| server.max_input_tokens).min(max_total_tokens.saturating_sub(1));
    let max_input_tokens = args.max_input_tokens.or(args.max_input_length).unwrap_or(allowed);
    if max_input_tokens > allowed {
        let reason = format!("the servers accept inputs of at most {allowed}");
        return Err(ResolveError::InputBeyondTotal { given: max_input_tokens, max_total_tokens, reason });
    }
    let queued = |(_, server): &(String, ServerDescription)| server.max_queued_tokens;
    Ok(SequenceLimits {
        max_input_tokens,
        max_total_tokens,
        max_new_tokens: described.iter().filter_map(|(_, server)| server.max_new_tokens).min(),
        max_queued_tokens: args
            .max_queued_tokens
            .unwrap_or_else(|| num_servers as u64 * described.iter().map(queued).min().unwrap_or(0)),
        choices: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_of_another_release_is_not_used() {
        let of = |release: &str| Properties(vec![(fingerprint::VERSION.to_owned(), release.to_owned())]);
        assert_eq!(check_release(&of(env!("CARGO_PKG_VERSION"))), Ok(()));
        let reason = check_release(&of("9.0.0")).unwrap_err();
        assert!(reason.starts_with("its release of penstock is 9.0.0, that of this router is "), "{reason}");
    }
}
