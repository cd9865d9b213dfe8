//! The opening of a connection between a server and a node.

use super::*;
use crate::flag::isa::CpuIsa;
use crate::flag::ranks_on::NodeAddress;
use crate::node::client::{NodeOptions, NodePlace};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// The answer of a node with `SECRET` to a server with `secret`, and whether the node has accepted the server.
async fn meeting(secret: &str) -> (Result<(), String>, bool) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let acceptor = TlsAcceptor::from(Arc::new(tls(&NodeSecret::new(SECRET).unwrap()).unwrap()));
    let node = tokio::spawn(async move {
        let stream = acceptor.accept(listener.accept().await.unwrap().0).await.ok()?;
        let (requests, mut reports) = tokio::io::split(stream);
        let line = Lines::new(requests).next().await;
        send(&mut reports, &Report::Accepted {}).await.unwrap();
        line
    });
    let address = NodeAddress { host: "127.0.0.1".to_owned(), port };
    let server = NodeOptions {
        place: NodePlace::fixed(address),
        secret: NodeSecret::new(secret).unwrap(),
        by_ray: false,
        num_ranks: 3,
        uses_gpus: true,
    };
    let connection = server.connect(CpuIsa::Auto).await;
    let first_line = node.await.unwrap();
    let open = first_line.and_then(|line| serde_json::from_str::<Open>(&line).ok());
    (connection.map(|_| ()), open.is_some_and(|open| open.check().is_ok() && open.num_ranks == 3 && open.uses_gpus))
}

#[tokio::test]
async fn a_server_and_a_node_prove_to_each_other_that_they_know_the_secret() {
    assert_eq!(meeting(SECRET).await, (Ok(()), true));
    let (refusal, was_accepted) = meeting(&SECRET.replace('f', "g")).await;
    assert!(refusal.unwrap_err().contains("does not have the secret of --node-secret-file") && !was_accepted);
}

fn node(python: &Path, gpus: Option<Semaphore>, num_servers: usize) -> Node {
    Node {
        python: python.to_owned(),
        address: IpAddr::from([127, 0, 0, 1]),
        acceptor: TlsAcceptor::from(Arc::new(tls(&NodeSecret::new(SECRET).unwrap()).unwrap())),
        servers: Semaphore::new(MAX_SERVERS - num_servers),
        gpus,
    }
}

fn server(listener: &TcpListener, uses_gpus: bool) -> NodeOptions {
    let address = NodeAddress { host: "127.0.0.1".to_owned(), port: listener.local_addr().unwrap().port() };
    let secret = NodeSecret::new(SECRET).unwrap();
    NodeOptions { place: NodePlace::fixed(address), secret, by_ray: false, num_ranks: 1, uses_gpus }
}

/// The reason that a node gives for what `open` asks of it, if Python is `/nowhere`.
async fn refusal(num_servers: usize, open: Open) -> String {
    let node = node(Path::new("/nowhere"), None, num_servers);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let openings = Arc::new(Semaphore::new(1));
    let permit = openings.clone().acquire_owned().await.unwrap();
    let refused = async {
        let mut connection = match server(&listener, open.uses_gpus).connect_with(open).await {
            Ok(connection) => connection,
            Err(reason) => return reason.split_once(" has no fork server: ").unwrap().1.to_owned(),
        };
        // What a server sends before it reads the refusal does not cost it the refusal.
        connection.requests.write_all(b"\n\n").await.unwrap();
        let report = connection.reports.next().await.unwrap();
        let Report::Lost { reason } = serde_json::from_str(&report).unwrap() else { panic!("{report}") };
        reason
    };
    let accepted = async {
        let (stream, peer) = listener.accept().await.unwrap();
        node.serve(stream, peer, permit).await.unwrap_err()
    };
    let (reason, error) = tokio::join!(refused, accepted);
    assert_eq!((openings.available_permits(), &reason), (1, &format!("{error:#}")));
    reason
}

#[tokio::test]
async fn a_server_learns_why_a_node_does_not_host_it() {
    let open = |uses_gpus| Open::new(1, uses_gpus, CpuIsa::Auto);
    let no_python = refusal(0, open(false)).await;
    assert!(no_python.starts_with("cannot start the fork server: "), "{no_python}");
    assert_eq!(refusal(MAX_SERVERS, open(false)).await, "this node hosts 64 servers already");
    let other_release = refusal(0, Open { release: "0.0.1".to_owned(), ..open(false) }).await;
    assert!(other_release.starts_with("the server is release 0.0.1, this node is release "), "{other_release}");
    let no_gpus = refusal(0, open(true)).await;
    assert!(no_gpus.starts_with("this node offers no GPUs; start it with --unencrypted-gpus"), "{no_gpus}");
}

/// A file that runs as Python. Another process writes it: this one must not have it open while other tests fork.
fn interpreter(folder: &Path, script: &str) -> PathBuf {
    let (source, python) = (folder.join("source"), folder.join("python"));
    std::fs::write(&source, script).unwrap();
    let status = std::process::Command::new("install").args(["-m", "755"]).args([&source, &python]).status();
    assert!(status.unwrap().success());
    python
}

/// A process that is killed on drop.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn assert_in_use(refusals: &mut tokio::sync::mpsc::UnboundedReceiver<String>) {
    let refusal = tokio::time::timeout(KILL_TIMEOUT, refusals.recv()).await.expect("a refusal").unwrap();
    assert_eq!(refusal, "the GPUs of this node are used by another server");
}

#[tokio::test]
async fn a_server_gets_the_gpus_of_a_node_when_the_workers_of_the_one_before_have_exited() {
    let folder = tempfile::tempdir().unwrap();
    // A fork server with a worker that outlives it.
    let mut worker = Killed(std::process::Command::new("sleep").arg("600").spawn().unwrap());
    let ended = folder.path().join("ended");
    let started = format!(r#"{{"started": {{"name": "worker-0.0", "pid": {}}}}}"#, worker.0.id());
    let script = format!("#!/bin/sh\necho '{started}'\ncat > /dev/null\ntouch {}\n", ended.display());
    let node = Arc::new(node(&interpreter(folder.path(), &script), Some(Semaphore::new(1)), 0));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (before, after) = (server(&listener, true), server(&listener, true));
    let (sender, mut refusals) = tokio::sync::mpsc::unbounded_channel();
    let serving = tokio::spawn(async move {
        let openings = Arc::new(Semaphore::new(MAX_OPENINGS));
        loop {
            let (stream, peer) = listener.accept().await.unwrap();
            let (node, sender) = (node.clone(), sender.clone());
            let permit = openings.clone().acquire_owned().await.unwrap();
            tokio::spawn(async move {
                if let Err(reason) = node.serve(stream, peer, permit).await {
                    let _ = sender.send(reason.to_string());
                }
            });
        }
    });
    let mut connection = before.connect(CpuIsa::Auto).await.unwrap();
    assert!(connection.reports.next().await.unwrap().contains("worker-0.0"));
    let waiting = tokio::spawn(async move {
        loop {
            match after.connect(CpuIsa::Auto).await {
                Ok(connection) => return connection,
                Err(reason) => assert!(reason.contains("was not free"), "{reason}"),
            }
        }
    });
    assert_in_use(&mut refusals).await;
    drop(connection);
    while !ended.exists() {
        tokio::time::sleep(EXIT_INTERVAL).await;
    }
    // One may have been sent before, but not two.
    while refusals.try_recv().is_ok() {}
    for _ in 0..2 {
        assert_in_use(&mut refusals).await;
    }
    worker.0.kill().unwrap(); // Its status is read when the test ends: until then it is a zombie.
    drop(waiting.await.unwrap());
    serving.abort();
}
