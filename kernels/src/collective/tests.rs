use super::*;
use crate::testing::Random;
use std::fs::File;
use std::os::fd::{AsFd, FromRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

fn memory(size: usize) -> File {
    // SAFETY: the name is a string, and the new descriptor has no other owner.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"ranks".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(segment_bytes(size) as u64).expect("memory");
    file
}

fn own_pid() -> i32 {
    std::process::id() as i32
}

/// Runs `of_rank` for every rank on a thread of its own, each with its own mapping of the memory.
fn on_ranks(size: usize, of_rank: impl Fn(&Collective) + Sync) {
    /// When a rank's test fails, the others go on with wrong data instead of waiting for it.
    struct Release<'a>(&'a Collective);
    impl Drop for Release<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                let desk = self.0.segment.desk(self.0.rank);
                desk.counter.publish(desk.counter.published().wrapping_add(1 << 30));
            }
        }
    }

    let memory = memory(size);
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (memory, of_rank) = (&memory, &of_rank);
            scope.spawn(move || {
                let collective = Collective::new(rank, &vec![own_pid(); size], memory.as_fd()).expect("the ranks run");
                let _release = Release(&collective);
                of_rank(&collective);
            });
        }
    });
}

/// Bytes of a rank's part, or of the joined parts, that tell row, column, rank and round apart.
fn byte(round: usize, rank: usize, row: usize, column: usize) -> u8 {
    (round * 31 + rank * 101 + row * 7 + column * 3 + column / 250) as u8
}

fn part(round: usize, rank: usize, num_rows: usize, width: usize) -> Vec<u8> {
    (0..num_rows * width).map(|at| byte(round, rank, at / width, at % width)).collect()
}

fn joined(round: usize, num_rows: usize, widths: &[usize]) -> Vec<u8> {
    let row = |row| {
        widths
            .iter()
            .enumerate()
            .flat_map(move |(rank, &width)| (0..width).map(move |column| byte(round, rank, row, column)))
    };
    (0..num_rows).flat_map(row).collect()
}

/// Gathers this rank's part of a round; without `receives` the result is empty.
fn gather(
    collective: &Collective,
    round: usize,
    num_rows: usize,
    widths: &[usize],
    receives: bool,
) -> Result<Vec<u8>, Failure> {
    let width = widths[collective.rank()];
    let bytes = part(round, collective.rank(), num_rows, width);
    let part = Part { address: Source::new(bytes.as_ptr()), stride: width, num_rows };
    let mut output = vec![0; if receives { num_rows * widths.iter().sum::<usize>() } else { 0 }];
    let target = receives.then(|| Target::new(output.as_mut_ptr()));
    // SAFETY: part and output have these rows.
    unsafe { collective.gather(&part, widths, target, |sleep| sleep()) }.map(|()| output)
}

#[test]
fn every_rank_gets_all_columns() {
    for widths in [&[64, 64][..], &[1, 130], &[5, 0, 9], &[0, 0, 3, 7]] {
        on_ranks(widths.len(), |collective| {
            for (round, num_rows) in [1, 0, 3, 1, 1, 40].into_iter().enumerate() {
                assert_eq!(gather(collective, round, num_rows, widths, true).unwrap(), joined(round, num_rows, widths));
            }
        });
    }
}

#[test]
fn parts_larger_than_a_slot_take_several_rounds() {
    let cases: [(usize, &[usize]); 4] = [
        (512, &[577, 600]),
        (3, &[SLOT_BYTES + 1, 1, SLOT_BYTES]),
        (1, &[5 * SLOT_BYTES, 0]),
        (2, &[SLOT_BYTES, SLOT_BYTES]),
    ];
    for (num_rows, widths) in cases {
        on_ranks(widths.len(), |collective| {
            for round in 0..3 {
                let found = gather(collective, round, num_rows, widths, true).unwrap();
                assert!(found == joined(round, num_rows, widths), "{num_rows} rows of {widths:?}");
            }
        });
    }
}

#[test]
fn rows_may_be_apart() {
    on_ranks(2, |collective| {
        let bytes = part(0, collective.rank(), 4, 10);
        let part = Part { address: Source::new(bytes.as_ptr()), stride: 10, num_rows: 4 };
        let mut output = vec![0; 4 * 6];
        // SAFETY: the first 3 bytes of 4 rows, and an output of as many.
        unsafe { collective.gather(&part, &[3, 3], Some(Target::new(output.as_mut_ptr())), |sleep| sleep()) }.unwrap();
        assert_eq!(output, joined(0, 4, &[3, 3]));
    });
}

#[test]
fn thousands_of_rounds_with_delays_mix_no_two() {
    for size in [2, 3, 4] {
        on_ranks(size, |collective| {
            let mut random = Random::new(collective.rank() as u64 + 1);
            let mut shared = Random::new(7); // the same on all ranks
            for round in 0..3000 {
                match random.next() % 300 {
                    0 => std::thread::sleep(Duration::from_micros(random.next() % 300)),
                    1..10 => std::thread::yield_now(),
                    _ => {}
                }
                let num_rows = shared.next() as usize % 4;
                let widths: Vec<usize> = (0..size).map(|_| shared.next() as usize % 80).collect();
                // Sometimes one rank receives, sometimes all.
                let receiver = shared.next() as usize % (2 * size);
                let receives = receiver >= size || receiver == collective.rank();
                let expected = if receives { joined(round, num_rows, &widths) } else { Vec::new() };
                assert_eq!(gather(collective, round, num_rows, &widths, receives).unwrap(), expected);
            }
        });
    }
}

#[test]
fn the_number_of_a_round_wraps_around() {
    let barrier = Barrier::new(2);
    on_ranks(2, |collective| {
        let start = u32::MAX - 2;
        *collective.last_round.lock().unwrap() = start;
        collective.segment.desk(collective.rank()).counter.publish(start);
        barrier.wait();
        for round in 0..6 {
            assert_eq!(gather(collective, round, 2, &[3, 4], true).unwrap(), joined(round, 2, &[3, 4]));
        }
    });
}

fn child(program: &str, argument: &str) -> Child {
    Command::new(program).arg(argument).stdout(Stdio::null()).spawn().expect("the program starts")
}

#[test]
fn a_rank_whose_process_ends_is_an_error() {
    let mut other = child("sleep", "0.3");
    let pid = other.id() as i32;
    let collective = Collective::new(0, &[own_pid(), pid], memory(2).as_fd()).unwrap();
    // It is not reaped yet: a zombie has ended too.
    assert_eq!(gather(&collective, 0, 1, &[4, 4], true), Err(Failure::Ended { rank: 1, pid }));
    other.wait().unwrap();
}

#[test]
fn a_round_that_was_published_before_the_end_is_read() {
    let mut other = child("sleep", "0.1");
    let memory = memory(2);
    let collective = Collective::new(0, &[own_pid(), other.id() as i32], memory.as_fd()).unwrap();
    other.wait().unwrap();
    let stand_in = Collective::new(1, &[own_pid(), own_pid()], memory.as_fd()).unwrap();
    // It only sends, so it need not wait for rank 0.
    gather(&stand_in, 0, 1, &[0, 4], false).unwrap();
    assert_eq!(gather(&collective, 0, 1, &[0, 4], true).unwrap(), joined(0, 1, &[0, 4]));
}

#[test]
fn ranks_that_disagree_on_the_rows_get_an_error() {
    on_ranks(2, |collective| {
        let rank = collective.rank();
        let expected = Failure::Differs { rank: 1 - rank, given_bytes: 4 * (3 - rank), expected_bytes: 4 * (2 + rank) };
        assert_eq!(gather(collective, 0, 2 + rank, &[4, 4], true), Err(expected));
    });
}

#[test]
fn memory_of_another_size_and_unknown_processes_are_refused() {
    let error = Collective::new(0, &[own_pid(); 3], memory(2).as_fd()).err().unwrap();
    assert!(error.to_string().contains("for 3 ranks"), "{error}");
    let mut other = child("true", "");
    other.wait().unwrap();
    assert!(Collective::new(0, &[own_pid(), other.id() as i32], memory(2).as_fd()).is_err());
}
