//! Virtual time: it passes only while everybody sleeps, and in one order.

mod common;
use common::*;
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

const MS: u64 = 1_000_000;

tests! {
    sleepers_wake_in_the_order_of_their_times [] {
        let cu = Cuda::open();
        let woken = Mutex::new(Vec::new());
        let start = cu.cudasim_now_ns();
        cu.on_threads(4, |cu, number| {
            for round in 0..3 {
                cu.cudasim_sleep_ns([40, 10, 30, 20][number] * MS);
                woken.lock().unwrap().push((cu.cudasim_now_ns() / MS, number, round));
            }
        });
        let woken = woken.into_inner().unwrap();
        assert!(woken.is_sorted_by_key(|&(time, ..)| time), "{woken:?}");
        let times = |number| -> Vec<u64> {
            woken.iter().filter(|&&(_, n, _)| n == number).map(|&(time, ..)| time).collect()
        };
        assert_eq!([times(0), times(1)], [[40, 80, 120], [10, 20, 30]]);
        assert_eq!([times(2), times(3)], [[30, 60, 90], [20, 40, 60]]);
        assert_eq!(cu.cudasim_now_ns() - start, 120 * MS, "the wait for the threads ends with the last");
    }

    who_slept_first_wakes_first_and_alone [] {
        let cu = Cuda::open();
        let (turn, order) = (AtomicU32::new(0), Mutex::new(Vec::new()));
        cu.on_threads(3, |cu, number| {
            // One after the other, all until the same moment.
            cu.cudasim_sleep_ns((number as u64 + 1) * MS);
            cu.cudasim_sleep_ns((9 - number as u64) * MS);
            assert_eq!(turn.swap(1, Ordering::SeqCst), 0, "another one runs");
            order.lock().unwrap().push(number);
            (0..1000).for_each(|_| std::thread::yield_now());
            turn.store(0, Ordering::SeqCst);
        });
        assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
    }

    no_time_passes_while_one_runs [] {
        let cu = Cuda::start();
        let s = cu.stream(1);
        ok(cu.cudasim_spin(s, 1));
        let start = cu.cudasim_now_ns();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(cu.cudasim_now_ns(), start);
        cu.cudasim_sleep_ns(1000);
        ok(cu.cuStreamQuery(s));
        assert_eq!(cu.cudasim_now_ns() - start, 1000);
    }

    who_is_woken_goes_on_before_time_does [] {
        let cu = Cuda::open();
        let (clock, words) = (cu.clock(), [AtomicU32::new(0), AtomicU32::new(0)]);
        for _ in 0..200 {
            words.iter().for_each(|word| word.store(0, Ordering::SeqCst));
            cu.on_threads(2, |cu, number| {
                if number == 0 {
                    clock.wait_for(&words[0]);
                    let woken = cu.cudasim_now_ns();
                    clock.set(&words[1]);
                    assert_eq!(woken % (10 * MS), 5 * MS);
                } else {
                    let start = cu.cudasim_now_ns();
                    cu.cudasim_sleep_ns(5 * MS);
                    clock.set(&words[0]);
                    clock.wait_for(&words[1]);
                    assert_eq!(cu.cudasim_now_ns() - start, 5 * MS);
                    cu.cudasim_sleep_ns(5 * MS);
                }
            });
        }
    }

    a_wait_by_a_word_ends_by_time_too [] {
        let cu = Cuda::open();
        let (clock, word) = (cu.clock(), AtomicU32::new(0));
        let start = cu.cudasim_now_ns();
        // SAFETY: the word outlives the calls.
        let wait = |seen, until| unsafe { (clock.wait)(word.as_ptr(), seen, until) };
        wait(1, u64::MAX);
        wait(0, start);
        assert_eq!(cu.cudasim_now_ns(), start, "neither was a wait");
        wait(0, start + 7 * MS);
        assert_eq!(cu.cudasim_now_ns() - start, 7 * MS);
    }

    work_and_waits_take_their_time_exactly [] {
        let cu = Cuda::start();
        let (a, b, memory) = (cu.stream(1), cu.stream(1), cu.alloc(512));
        let start = cu.cudasim_now_ns();
        ok(cu.cudasim_spin(a, 3_600_000_000));
        ok(cu.cudasim_poke(b, memory, 7, 1, 20_000));
        ok(cu.cuStreamSynchronize(b));
        assert_eq!((cu.cudasim_now_ns() - start, peek(memory)), (20 * MS, 7));
        ok(cu.cuCtxSynchronize());
        assert_eq!(cu.cudasim_now_ns() - start, 3_600_000 * MS);
        // A program that polls gets on.
        ok(cu.cudasim_spin(a, 50));
        let polls = (0..).take_while(|_| cu.cuStreamQuery(a) == 600).count();
        assert_eq!(polls, 50);
    }

    who_waits_for_a_sleeper_s_turn_holds_nothing_up [] {
        let cu = Cuda::start();
        ok(cu.cudasim_spin(0, 100_000));
        cu.on_threads(2, |cu, number| {
            // The first ends the context, which waits for its work; the second wants it meanwhile.
            cu.cudasim_sleep_ns((number as u64 + 1) * MS);
            if number == 0 {
                ok(cu.cuDevicePrimaryCtxReset_v2(0));
            } else {
                ok(cu.cuDevicePrimaryCtxRetain(&mut 0, 0));
            }
            assert_eq!(cu.cudasim_now_ns(), 100 * MS);
        });
    }

    a_thread_that_left_holds_nothing_up [] {
        let cu = Cuda::start();
        let s = cu.stream(1);
        ok(cu.cudasim_spin(s, 1000));
        cu.cudasim_thread_leave();
        while (cu.clock().now)() < MS {
            std::thread::yield_now();
        }
        cu.cudasim_thread_enter();
        cu.cudasim_thread_enter();
        let start = cu.cudasim_now_ns();
        cu.cudasim_sleep_ns(MS);
        assert_eq!(cu.cudasim_now_ns() - start, MS);
    }

    a_child_of_fork_goes_on_alone [] {
        let cu = Cuda::start();
        let s = cu.stream(1);
        ok(cu.cudasim_spin(s, 1_000_000));
        cu.cudasim_sleep_ns(MS);
        // SAFETY: the child only sleeps, looks and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let start = cu.cudasim_now_ns();
            cu.cudasim_sleep_ns(5 * MS);
            let good = start == MS && cu.cudasim_now_ns() == 6 * MS;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if good { 7 } else { 1 }) };
        }
        let mut how = 0;
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut how, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(how), 7);
        assert_eq!(cu.cudasim_now_ns(), MS, "the child's time is its own");
    }

    the_choice_comes_before_the_first_use ["CUDASIM_CLOCK" = "host"] {
        let cu = Cuda::start();
        assert!(cu.cudasim_clock().is_null());
        assert_eq!(cu.cudasim_use_virtual_clock(), 800);
        let start = cu.cudasim_now_ns();
        cu.cudasim_sleep_ns(MS);
        assert!(cu.cudasim_now_ns() - start >= MS);
    }

    the_choice_can_be_a_call ["CUDASIM_CLOCK" = ""] {
        let cu = Cuda::open();
        ok(cu.cudasim_use_virtual_clock());
        ok(cu.cuInit(0));
        assert_eq!((cu.cudasim_now_ns(), cu.cudasim_clock().is_null()), (0, false));
    }

    a_clock_that_is_stuck_says_so [] {
        static WORD: AtomicU32 = AtomicU32::new(0);
        let clock = Cuda::open().clock();
        let mut ends = [0; 2];
        // SAFETY: the array has room for both ends; the second becomes stderr.
        let mut report = unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            assert_eq!(libc::dup2(ends[1], 2), 2);
            File::from_raw_fd(ends[0])
        };
        std::thread::spawn(move || {
            let (mut text, mut piece) = (String::new(), [0; 4096]);
            while !text.contains("the virtual clock is stuck at 0 ns") {
                let length = report.read(&mut piece).unwrap();
                text += std::str::from_utf8(&piece[..length]).unwrap();
            }
            // Not a participant, so that it can help.
            clock.set(&WORD);
        });
        clock.wait_for(&WORD);
    }
}
