//! Collectives of the ranks of one host.

use super::require;
use super::view::Rows;
use crate::collective::{self, Failure, Part};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// One rank's view of the group. All ranks must make the same calls in the same order.
#[pyclass(frozen)]
pub(super) struct Collective(pub(super) Arc<collective::Collective>);

#[pymethods]
impl Collective {
    /// Bytes of the memory that `size` ranks share.
    #[staticmethod]
    fn memory_bytes(size: usize) -> usize {
        collective::segment_bytes(size)
    }

    /// Joins the processes `pids`; this process is number `rank`. `memory`: the descriptor of a file of `memory_bytes`
    /// zeros, the same file for all; it may be closed afterwards. Raises OSError if the memory or a process cannot be
    /// used.
    #[new]
    fn new(rank: usize, pids: Vec<i32>, memory: i32) -> PyResult<Collective> {
        require(rank < pids.len(), || format!("rank is {rank} of {} ranks", pids.len()))?;
        require(memory >= 0, || format!("memory is {memory}, must be an open file descriptor"))?;
        // SAFETY: the caller keeps the file open during the call; a number that is no descriptor is an error of the system.
        let memory = unsafe { BorrowedFd::borrow_raw(memory) };
        Ok(Collective(Arc::new(collective::Collective::new(rank, &pids, memory)?)))
    }

    /// Joins the columns of the ranks' parts [rows, widths[rank]] in output [rows, sum(widths)]; without output, this rank only sends.
    /// Raises RuntimeError if another rank's process has ended.
    #[pyo3(signature = (part, widths, output=None))]
    fn gather(&self, py: Python<'_>, part: Rows<'_>, widths: Vec<usize>, output: Option<Rows<'_>>) -> PyResult<()> {
        let (rank, size) = (self.0.rank(), self.0.size());
        require(widths.len() == size, || format!("there are {} widths for {size} ranks", widths.len()))?;
        part.expect("part", [part.num_rows, widths[rank]], part.dtype)?;
        if let Some(output) = &output {
            output.expect("output", [part.num_rows, widths.iter().sum()], part.dtype)?;
        }
        let target = output.map(|output| output.target("output")).transpose()?;
        let widths: Vec<usize> = widths.iter().map(|width| width * part.dtype.bytes()).collect();
        let rows = Part { address: part.address(), stride: part.stride_bytes, num_rows: part.num_rows };
        // PERF: only a wait that has become long lets other Python threads run, because taking the lock again can cost a switch interval.
        // SAFETY: part and output have these sizes, and the references to them live until the call ends.
        let done = unsafe { self.0.gather(&rows, &widths, target, |sleep| py.detach(sleep)) };
        done.map_err(|failure| error_of(&failure))
    }
}

pub(super) fn error_of(failure: &Failure) -> PyErr {
    PyRuntimeError::new_err(match *failure {
        Failure::Ended { rank, pid } => format!("rank {rank} (process {pid}) has exited"),
        Failure::Differs { rank, given_bytes, expected_bytes } => {
            format!("rank {rank} gave {given_bytes} bytes to a collective, must give {expected_bytes}")
        }
        Failure::Busy => "another thread of this rank is inside a collective".to_owned(),
    })
}
