//! Groups of fake workers that replace each other as they are lost.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::future::BoxFuture;
use penstock_router::engine::{Engine, EngineOptions, RestartError, RestartGroup, RestartTimes, Restarted};
use penstock_router::worker::Group;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::setting::PATIENCE;
use super::{FakeGroup, Script};

/// A restart starts the next group, and fails when there is none. Clones are the same fleet.
#[derive(Clone)]
pub struct Fleet {
    scripts: Arc<Mutex<VecDeque<Vec<Script>>>>,
    started: watch::Sender<Vec<Arc<FakeGroup>>>,
    /// Restarts that were requested, and restarts that may proceed.
    asked: watch::Sender<usize>,
    allowed: watch::Sender<usize>,
    /// Runs the workers, also those that the engine's thread starts.
    runtime: Handle,
}

impl Fleet {
    /// The scripts of each group's ranks; a group without ranks fails its restart. The workers run on the current runtime.
    pub fn new(scripts: impl IntoIterator<Item = Vec<Script>>) -> Self {
        Self {
            scripts: Arc::new(Mutex::new(scripts.into_iter().collect())),
            started: watch::Sender::new(Vec::new()),
            asked: watch::Sender::new(0),
            allowed: watch::Sender::new(usize::MAX),
            runtime: Handle::current(),
        }
    }

    /// An engine on the first group.
    pub async fn engine(&self, options: EngineOptions) -> Engine {
        Engine::start(self.group().await, options, Arc::new(self.clone()), None)
    }

    /// The next group.
    pub async fn group(&self) -> Group {
        Group::connect(&self.next().unwrap().endpoints(), PATIENCE).await.unwrap()
    }

    pub fn next(&self) -> Option<Arc<FakeGroup>> {
        let scripts = self.scripts.lock().unwrap().pop_front().filter(|scripts| !scripts.is_empty())?;
        let _context = self.runtime.enter();
        let group = Arc::new(FakeGroup::start(scripts));
        self.started.send_modify(|started| started.push(group.clone()));
        Some(group)
    }

    /// Waits until group `number`, counted from 1, was started.
    pub async fn started(&self, number: usize) -> Arc<FakeGroup> {
        self.started.subscribe().wait_for(|started| started.len() >= number).await.unwrap()[number - 1].clone()
    }

    pub fn num_started(&self) -> usize {
        self.started.borrow().len()
    }

    /// Lets the first `num_restarts` restarts proceed; further ones wait.
    pub fn allow(&self, num_restarts: usize) {
        self.allowed.send_replace(num_restarts);
    }

    pub fn num_asked(&self) -> usize {
        *self.asked.borrow()
    }

    pub async fn wait_until_asked(&self, num_restarts: usize) {
        self.asked.subscribe().wait_for(|asked| *asked >= num_restarts).await.unwrap();
    }

    async fn start(&self) -> Result<Restarted, RestartError> {
        self.asked.send_modify(|asked| *asked += 1);
        let number = self.num_asked();
        self.allowed.subscribe().wait_for(|allowed| number <= *allowed).await.unwrap();
        let next = self.next().ok_or_else(|| RestartError("there is no other worker".to_owned()))?;
        let group = Group::connect(&next.endpoints(), PATIENCE).await.unwrap();
        Ok(Restarted { group, times: RestartTimes::default() })
    }
}

impl RestartGroup for Fleet {
    fn restart(&self) -> BoxFuture<'static, Result<Restarted, RestartError>> {
        let fleet = self.clone();
        async move { fleet.start().await }.boxed()
    }
}
