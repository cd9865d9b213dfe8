//! Flags of `penstock node`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

/// Host ranks of a model for servers on other machines (--ranks-on)
///
/// Every connection is encrypted, and both sides prove that they know the secret.
#[derive(Clone, Debug, Args)]
pub(crate) struct NodeArgs {
    /// IP address and port to listen on, as other machines reach them. Workers listen on the same address, on ports that the system
    /// chooses, with certificates made for each group
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: SocketAddr,

    /// File with the secret that this node and the servers that use it share, at least 32 characters
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: PathBuf,

    /// Offer this machine's GPUs, one for each rank, to one server at a time. GPUs of several machines exchange tensors by NCCL, which
    /// neither encrypts nor checks who connects: only for a private network, whose interface NCCL_SOCKET_IFNAME names.
    /// CUDA_VISIBLE_DEVICES chooses the GPUs. Has not been run on GPUs yet
    #[arg(long)]
    pub(crate) unencrypted_gpus: bool,

    /// Log one JSON object per line
    #[arg(long)]
    pub(crate) json_output: bool,

    /// Stop when standard input ends, as it does when the program that started this node is killed
    #[arg(long)]
    pub(crate) stop_with_stdin: bool,
}
