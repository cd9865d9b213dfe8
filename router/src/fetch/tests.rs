use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Mutex;

use futures::FutureExt;
use futures::future::BoxFuture;
use proptest::prelude::*;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::*;

/// An address that is public, and never connected to.
const PUBLIC: &str = "93.184.216.34";
const MAX_BYTES: usize = 100_000;
/// For the name `public`, signed by itself.
const CERTIFICATE: &[u8] = include_bytes!("../../tests/fixtures/tls/certificate.pem");

/// Names with any addresses. A connection to a public address is one to `server`.
#[derive(Clone, Default)]
struct FakeNetwork {
    names: Arc<Mutex<HashMap<String, Vec<String>>>>,
    connected: Arc<Mutex<Vec<IpAddr>>>,
    server: Option<SocketAddr>,
}

impl Network for FakeNetwork {
    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let known = self.names.lock().unwrap().get(host).cloned();
        // The system's resolver takes addresses as well.
        let addresses = known.unwrap_or_else(|| vec![host.to_owned()]);
        let parse = |address: String| address.parse().map(|ip| SocketAddr::new(ip, port)).map_err(io::Error::other);
        std::future::ready(addresses.into_iter().map(parse).collect()).boxed()
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<TcpStream>> {
        self.connected.lock().unwrap().push(address.ip());
        match self.server {
            Some(server) => TcpStream::connect(server).boxed(),
            None => std::future::ready(Err(io::Error::from(io::ErrorKind::ConnectionRefused))).boxed(),
        }
    }
}

impl FakeNetwork {
    fn name(self, name: &str, addresses: &[&str]) -> Self {
        let addresses = addresses.iter().map(|address| (*address).to_owned()).collect();
        self.names.lock().unwrap().insert(name.to_owned(), addresses);
        self
    }

    async fn fetch(&self, url: &str) -> Result<Vec<u8>, FetchError> {
        self.fetch_allowing(&[], url).await
    }

    async fn fetch_allowing(&self, allowed: &[&str], url: &str) -> Result<Vec<u8>, FetchError> {
        let allowed_hosts = allowed.iter().map(|host| host.parse().unwrap()).collect();
        let fetcher = Fetcher::over(Box::new(self.clone()), ImageUrlConfig { allowed_hosts, max_bytes: MAX_BYTES });
        fetcher.fetch(&Url::parse(url).unwrap(), &fetcher.budget()).await
    }

    fn connected(&self) -> Vec<IpAddr> {
        self.connected.lock().unwrap().clone()
    }
}

/// The name `public` has a server that answers each connection with what `script` makes of its request's line.
async fn serving<F: Future<Output = ()> + Send>(
    script: impl Fn(String, TcpStream) -> F + Send + Sync + 'static,
) -> FakeNetwork {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Some(listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            script(head, stream).await;
        }
    });
    FakeNetwork { server, ..FakeNetwork::default() }.name("public", &[PUBLIC])
}

/// Answers by the path.
async fn answering(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> FakeNetwork {
    serving(move |head, mut stream| {
        let answer = answer(head.split(' ').nth(1).unwrap());
        async move { drop(stream.write_all(answer.as_bytes()).await) }
    })
    .await
}

fn redirect(location: &str) -> String {
    format!("HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n")
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn not_public(host: &str) -> FetchError {
    FetchError::NotPublic { host: host.to_owned() }
}

#[tokio::test]
async fn a_file_is_fetched_with_its_host_and_nothing_of_ours() {
    let network = serving(|head, mut stream| async move {
        let expected =
            format!("GET /a?b=c HTTP/1.1\r\nhost: public:81\r\naccept: image/*\r\nuser-agent: {USER_AGENT}\r\n\r\n");
        assert_eq!(head, expected);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").await.unwrap();
    })
    .await;
    assert_eq!(network.fetch("http://public:81/a?b=c").await.unwrap(), b"hello");
    assert_eq!(network.connected(), [PUBLIC.parse::<IpAddr>().unwrap()]);
}

#[tokio::test]
async fn a_name_with_only_private_addresses_is_not_connected_to() {
    let network = answering(|_| ok("secret")).await.name("rebound", &["127.0.0.1", "::1", "169.254.169.254"]);
    assert_eq!(network.fetch("http://rebound/").await, Err(not_public("rebound")));
    assert_eq!(network.fetch("http://10.0.0.1:8080/").await, Err(not_public("10.0.0.1")));
    assert_eq!(network.fetch("http://[::ffff:8.8.8.8]/").await, Err(not_public("::ffff:8.8.8.8")));
    assert_eq!(network.fetch("http://unknown/").await, Err(not_public("unknown")), "as if it had a private address");
    assert_eq!(network.connected(), [] as [IpAddr; 0]);
}

#[tokio::test]
async fn of_a_name_with_public_and_private_addresses_only_the_public_ones_are_used() {
    let network = answering(|_| ok("file")).await.name("mixed", &["127.0.0.1", PUBLIC, "10.0.0.1"]);
    assert_eq!(network.fetch("http://mixed/").await.unwrap(), b"file");
    assert_eq!(network.connected(), [PUBLIC.parse::<IpAddr>().unwrap()]);
}

#[tokio::test]
async fn allowed_hosts_may_have_private_addresses() {
    let network = answering(|_| ok("file")).await.name("images.internal", &["10.1.2.3"]);
    for allowed in ["images.internal", "*.internal", "10.1.0.0/16"] {
        assert_eq!(network.fetch_allowing(&[allowed], "http://images.internal/").await.unwrap(), b"file");
    }
    assert!(network.fetch_allowing(&["other.internal", "10.2.0.0/16"], "http://images.internal/").await.is_err());
}

#[tokio::test]
async fn redirects_are_followed_to_public_addresses_only() {
    let network = answering(|path| match path {
        "/a/relative" => redirect("next"),
        "/a/next" => redirect("http://other/file"),
        "/file" => ok("file"),
        "/private" => redirect("http://10.0.0.1/"),
        "/rebound" => redirect("//rebound/"),
        "/scheme" => redirect("file:///etc/passwd"),
        "/credentials" => redirect("http://a:b@public/file"),
        "/without" => "HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n".to_owned(),
        path => redirect(path),
    })
    .await
    .name("other", &["2606:4700::1111"])
    .name("rebound", &["127.0.0.1"]);
    let public = "public".to_owned();
    assert_eq!(network.fetch("http://public/a/relative").await.unwrap(), b"file");
    assert_eq!(network.fetch("http://public/private").await, Err(not_public("10.0.0.1")));
    assert_eq!(network.fetch("http://public/rebound").await, Err(not_public("rebound")));
    assert_eq!(network.fetch("http://public/loop").await, Err(FetchError::Redirects { host: public.clone() }));
    for path in ["scheme", "credentials", "without"] {
        let fetched = network.fetch(&format!("http://public/{path}")).await;
        assert_eq!(fetched, Err(FetchError::Redirect { host: public.clone() }), "{path}");
    }
    assert!(network.connected().iter().all(|address| address::is_public(*address)));
}

#[tokio::test]
async fn another_status_is_reported_without_the_body() {
    for status in [201, 204, 206, 304, 404, 500] {
        let network = answering(move |_| format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n")).await;
        let message = network.fetch("http://public/").await.unwrap_err().to_string();
        assert_eq!(message, format!("public answered with status {status}"));
    }
}

#[tokio::test]
async fn a_body_without_an_end_is_cut_off() {
    let network = serving(|_, mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
        while stream.write_all(&[0; 4096]).await.is_ok() {}
    })
    .await;
    assert_eq!(network.fetch("http://public/").await, Err(FetchError::TooLarge { max: MAX_BYTES }));
}

#[tokio::test]
async fn the_files_of_a_prompt_share_one_budget() {
    let network = answering(|_| ok(&"x".repeat(MAX_BYTES / 2))).await;
    let config = ImageUrlConfig { allowed_hosts: Vec::new(), max_bytes: MAX_BYTES };
    let fetcher = Fetcher::over(Box::new(network), config);
    let (url, budget) = (Url::parse("http://public/").unwrap(), fetcher.budget());
    assert!(fetcher.fetch(&url, &budget).await.is_ok() && fetcher.fetch(&url, &budget).await.is_ok());
    assert_eq!(fetcher.fetch(&url, &budget).await, Err(FetchError::TooLarge { max: MAX_BYTES }));
    assert!(fetcher.fetch(&url, &fetcher.budget()).await.is_ok());
}

#[tokio::test]
async fn what_is_not_an_answer_is_refused() {
    let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 0\r\n\r\n", "x".repeat(2 * MAX_HEAD_BYTES));
    let short = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfile".to_owned();
    for answer in [long, short, "SSH-2.0-OpenSSH_9.2\r\n".to_owned(), String::new()] {
        let network = answering(move |_| answer.clone()).await;
        let fetched = network.fetch("http://public/").await;
        assert_eq!(fetched, Err(FetchError::Malformed { host: "public".to_owned() }));
    }
}

/// The clock stands still while anything can happen, and jumps otherwise.
#[tokio::test(start_paused = true)]
async fn a_slow_answer_is_given_up() {
    let network = serving(|_, mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
        while stream.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    })
    .await;
    let late = FetchError::Late { host: "public".to_owned() };
    assert_eq!(late.to_string(), "public did not send the image within 20 s");
    assert_eq!(network.fetch("http://public/").await, Err(late));
}

#[tokio::test]
async fn a_fetch_that_is_dropped_closes_its_connection() {
    let (closed, seen) = tokio::sync::oneshot::channel();
    let closed = Mutex::new(Some(closed));
    let (began, begun) = tokio::sync::oneshot::channel();
    let began = Mutex::new(Some(began));
    let network = serving(move |_, mut stream| {
        let (closed, began) = (closed.lock().unwrap().take().unwrap(), began.lock().unwrap().take().unwrap());
        async move {
            began.send(()).unwrap();
            assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
            closed.send(()).unwrap();
        }
    })
    .await;
    tokio::select! {
        fetched = network.fetch("http://public/") => panic!("{fetched:?}"),
        begun = begun => begun.unwrap(),
    }
    seen.await.unwrap();
}

/// A server with a certificate for the name `public`.
async fn serving_tls() -> FakeNetwork {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE).unwrap();
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("../../tests/fixtures/tls/key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let (acceptor, listener) = (TlsAcceptor::from(Arc::new(config)), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let server = Some(listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            stream.write_all(ok("file").as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
        }
    });
    FakeNetwork { server, ..FakeNetwork::default() }.name("public", &[PUBLIC]).name("other", &[PUBLIC])
}

#[tokio::test]
async fn https_needs_a_trusted_certificate_of_the_host() {
    let network = serving_tls().await;
    let fetch = async |is_trusted, url| {
        let config = ImageUrlConfig { allowed_hosts: Vec::new(), max_bytes: MAX_BYTES };
        let fetcher = Fetcher::over(Box::new(network.clone()), config);
        let mut roots = RootCertStore::empty();
        if is_trusted {
            roots.add(CertificateDer::from_pem_slice(CERTIFICATE).unwrap()).unwrap();
        }
        assert!(fetcher.tls.set(tls(roots)).is_ok());
        fetcher.fetch(&Url::parse(url).unwrap(), &fetcher.budget()).await
    };
    let unreachable = |host: &str| Err(FetchError::Unreachable { host: host.to_owned() });
    assert_eq!(fetch(true, "https://public/").await.unwrap(), b"file");
    assert_eq!(fetch(true, "https://other/").await, unreachable("other"), "the certificate of another host");
    assert_eq!(fetch(false, "https://public/").await, unreachable("public"), "an unknown authority");
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    let embedded = (any::<u32>(), prop::sample::select(vec![0xffff_u128 << 32, 0x64_ff9b << 96]))
        .prop_map(|(low, high)| IpAddr::from((high | u128::from(low)).to_be_bytes()));
    let global = any::<u128>().prop_map(|bits| IpAddr::from((bits >> 3 | 1 << 125).to_be_bytes()));
    prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), any::<[u8; 16]>().prop_map(IpAddr::from), embedded, global]
}

proptest! {
    #[test]
    fn only_public_addresses_are_connected_to(addresses in prop::collection::vec(any_address(), 0..6)) {
        let texts: Vec<_> = addresses.iter().map(IpAddr::to_string).collect();
        let network = FakeNetwork::default().name("any", &texts.iter().map(String::as_str).collect::<Vec<_>>());
        let fetched = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
            .block_on(network.fetch("http://any/"));
        let public: Vec<_> = addresses.into_iter().filter(|address| address::is_public(*address)).collect();
        let unreachable = FetchError::Unreachable { host: "any".to_owned() };
        prop_assert_eq!(fetched, Err(if public.is_empty() { not_public("any") } else { unreachable }));
        prop_assert_eq!(network.connected(), public);
    }
}
