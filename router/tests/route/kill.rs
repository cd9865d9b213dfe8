//! Servers are killed and drained again and again under streams. Slow: `cargo test --test route -- --ignored`.

use penstock_router::generator::Generator;

use crate::fake_worker::setting::{PATIENCE, wait_until};
use crate::server::{Server, Setup, route, streams};

const NUM_ROUNDS: usize = 500;

/// Each round, `stop` stops one of two servers while both have sequences; then it is started again on its address.
async fn no_token_is_lost(stop: impl Fn(&mut Server)) {
    let mut servers = [Setup::default().start().await, Setup::default().start().await];
    let replicas = route(&servers.each_ref(), PATIENCE).await;
    for round in 0..NUM_ROUNDS {
        wait_until(|| {
            replicas.stats().num_blocks == 2 * 256 && replicas.replicas().iter().all(|it| it.is_healthy == Some(true))
        })
        .await;
        let victim = &mut servers[round % 2];
        let num_plans = victim.num_plans().await as u64;
        let running = streams(&replicas);
        victim.wait_for_plans(num_plans + 1 + round as u64 % 15).await;
        stop(victim);
        running.await.expect("every stream has the tokens that it should have");
        victim.kill();
        *victim = Setup { address: victim.address, ..Setup::default() }.start().await;
    }
}

#[tokio::test]
#[ignore = "slow"]
async fn five_hundred_kills_change_no_token() {
    no_token_is_lost(Server::kill).await;
}

#[tokio::test]
#[ignore = "slow"]
async fn five_hundred_drains_change_no_token() {
    no_token_is_lost(|server| server.shutdown.cancel()).await;
}
