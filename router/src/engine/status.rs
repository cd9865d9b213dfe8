//! What the engine's thread publishes to its handles.

use std::sync::Arc;

use penstock_scheduler::Stats;
use tokio::sync::watch;

use super::speed::Speed;
use crate::generator::Health;
use crate::sequence::ServerAdapters;

/// The publishing side.
///
/// INVARIANT: a permanent health never changes again.
#[derive(Clone)]
pub(super) struct Status {
    health: watch::Sender<Health>,
    stats: watch::Sender<Stats>,
    /// Adapters of the other server, if the engine is on one.
    adapters: watch::Sender<Arc<ServerAdapters>>,
    speed: Speed,
}

impl Status {
    pub(super) fn new(stats: Stats) -> Self {
        Self {
            health: watch::Sender::new(Health::Healthy),
            stats: watch::Sender::new(stats),
            adapters: watch::Sender::default(),
            speed: Speed::new(),
        }
    }

    pub(super) fn subscribe(&self) -> (watch::Receiver<Health>, watch::Receiver<Stats>) {
        (self.health.subscribe(), self.stats.subscribe())
    }

    pub(super) fn adapters(&self) -> watch::Receiver<Arc<ServerAdapters>> {
        self.adapters.subscribe()
    }

    pub(super) fn speed(&self) -> &Speed {
        &self.speed
    }

    pub(super) fn is_permanent(&self) -> bool {
        self.health.borrow().is_permanent()
    }

    pub(super) fn health(&self) -> Health {
        self.health.borrow().clone()
    }

    pub(super) fn set_stats(&self, stats: Stats) {
        self.stats.send_replace(stats);
    }

    pub(super) fn set_adapters(&self, adapters: Arc<ServerAdapters>) {
        self.adapters.send_replace(adapters);
    }

    pub(super) fn set_health(&self, health: Health) {
        self.change_health(health, |current| !current.is_permanent());
    }

    /// What the watchdog found; has no effect until the current group has finished a step.
    pub(super) fn set_group_health(&self, health: Health) {
        self.change_health(health, |current| current.is_healthy() || current.is_stuck());
    }

    fn change_health(&self, health: Health, may_change: impl FnOnce(&Health) -> bool) {
        self.health.send_if_modified(|current| {
            let changes = may_change(current) && *current != health;
            if changes {
                if health.is_healthy() {
                    self.speed.forget();
                }
                *current = health;
            }
            changes
        });
    }
}
