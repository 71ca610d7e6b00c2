//! A program that connects as it is told, one order a line, one JSON answer a line; an order may
//! also be its arguments.
//!
//! Tests run it inside a control group, where each `connect()` it makes is an ordinary program's.

mod crowd;
mod socket;
mod uring;

use std::{
    io::{BufRead as _, Write as _},
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    sync::Barrier,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use socket::{EINPROGRESS, Plan, Socket};

fn main() {
    let mut kept: Vec<Socket> = Vec::new();
    let stdout = std::io::stdout();
    let args: Vec<String> = std::env::args().skip(1).collect();
    if !args.is_empty() {
        let words: Vec<&str> = args.iter().map(String::as_str).collect();
        let _ = writeln!(stdout.lock(), "{}", carry_out(&words, &mut kept));
        return;
    }
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let answer = carry_out(&words, &mut kept);
        let mut out = stdout.lock();
        if writeln!(out, "{answer}")
            .and_then(|()| out.flush())
            .is_err()
        {
            return;
        }
    }
}

fn carry_out(words: &[&str], kept: &mut Vec<Socket>) -> Value {
    match words {
        ["connect", to, how @ ..] => connect(address(to), &Plan::from(how)),
        ["burst", count, to, how @ ..] => burst(number(count), address(to), &Plan::from(how)),
        ["crowd", threads, longest, to, how @ ..] => crowd::run(
            number(threads),
            millis(longest),
            address(to),
            &Plan::from(how),
        ),
        ["steady", to] => steady(address(to)),
        ["enough"] => json!(null),
        ["open", count, to, how @ ..] => {
            let plan = Plan {
                nonblocking: true,
                ..Plan::from(how)
            };
            let errnos: Vec<i32> = (0..number(count))
                .map(|_| open(address(to), &plan, kept))
                .collect();
            json!(errnos)
        }
        ["user_timeouts"] => json!(kept.iter().map(Socket::user_timeout).collect::<Vec<_>>()),
        ["settle", longest] => settle(kept, millis(longest)),
        ["close"] => {
            kept.clear();
            json!(null)
        }
        ["sweep", count, first] => sweep(number(count), address(first)),
        ["until", longest, to] => until(millis(longest), address(to)),
        _ => panic!("unknown order {words:?}"),
    }
}

fn number(word: &str) -> usize {
    word.parse().expect("a number")
}

fn millis(word: &str) -> Duration {
    Duration::from_millis(word.parse().expect("milliseconds"))
}

fn address(word: &str) -> SocketAddr {
    word.parse().expect("an address with a port")
}

fn connect(to: SocketAddr, plan: &Plan) -> Value {
    let socket = Socket::new(to, plan);
    let began = Instant::now();
    let mut errno = if plan.uring {
        uring::connect(&socket, to)
    } else {
        socket.connect(to)
    };
    if errno == EINPROGRESS {
        let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
        poll(&mut fds, None).expect("poll");
        errno = socket.error();
    }
    let elapsed = began.elapsed();
    ended(errno, elapsed, &socket)
}

fn ended(errno: i32, elapsed: Duration, socket: &Socket) -> Value {
    let user_timeout = socket.user_timeout();
    json!({"errno": errno, "elapsed_us": elapsed.as_micros() as u64, "user_timeout": user_timeout})
}

fn burst(count: usize, to: SocketAddr, plan: &Plan) -> Value {
    let barrier = Barrier::new(count);
    let ends: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|_| {
                scope.spawn(|| {
                    let socket = Socket::new(to, plan);
                    barrier.wait();
                    let began = Instant::now();
                    let errno = socket.connect(to);
                    ended(errno, began.elapsed(), &socket)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread"))
            .collect()
    });
    json!(ends)
}

fn open(to: SocketAddr, plan: &Plan, kept: &mut Vec<Socket>) -> i32 {
    let socket = Socket::new(to, plan);
    let errno = socket.connect(to);
    kept.push(socket);
    errno
}

fn settle(kept: &[Socket], longest: Duration) -> Value {
    let began = Instant::now();
    let mut errnos = vec![EINPROGRESS; kept.len()];
    loop {
        let pending: Vec<usize> = (0..kept.len())
            .filter(|i| errnos[*i] == EINPROGRESS)
            .collect();
        let left = longest.saturating_sub(began.elapsed());
        if pending.is_empty() || left.is_zero() {
            return json!(errnos);
        }
        let mut fds: Vec<PollFd<'_>> = pending
            .iter()
            .map(|i| PollFd::from_borrowed_fd(kept[*i].as_fd(), PollFlags::OUT))
            .collect();
        poll(
            &mut fds,
            Some(&Timespec::try_from(left).expect("a short time")),
        )
        .expect("poll");
        for (fd, i) in fds.iter().zip(pending) {
            if !fd.revents().is_empty() {
                errnos[i] = kept[i].error();
            }
        }
    }
}

fn sweep(count: usize, first: SocketAddr) -> Value {
    let IpAddr::V4(ip) = first.ip() else {
        panic!("sweeps are IPv4")
    };
    let mut errnos = std::collections::BTreeMap::<String, u64>::new();
    for i in 0..count {
        let to = SocketAddr::new((u32::from(ip) + i as u32).into_ip(), first.port());
        let errno = Socket::new(to, &Plan::default()).connect(to);
        *errnos.entry(errno.to_string()).or_default() += 1;
    }
    json!(errnos)
}

trait IntoIp {
    fn into_ip(self) -> IpAddr;
}

impl IntoIp for u32 {
    fn into_ip(self) -> IpAddr {
        IpAddr::V4(self.into())
    }
}

/// A connect each millisecond until the next order comes: how often each errno came, and between which
/// times (since the begin, us) those were that were established.
fn steady(to: SocketAddr) -> Value {
    let began = Instant::now();
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let stdin = std::io::stdin();
    let is_ordered = || {
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        poll(&mut fds, Some(&at_once)).expect("poll") > 0
    };
    let mut errnos = std::collections::BTreeMap::<String, u64>::new();
    let (mut first, mut last) = (None, None);
    while !is_ordered() {
        let socket = Socket::new(to, &Plan::default());
        socket.reset_at_close();
        let errno = socket.connect(to);
        *errnos.entry(errno.to_string()).or_default() += 1;
        if errno == 0 {
            last = Some(began.elapsed().as_micros() as u64);
            first = first.or(last);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    json!({"errnos": errnos, "first_us": first, "last_us": last})
}

fn until(longest: Duration, to: SocketAddr) -> Value {
    let began = Instant::now();
    let mut refused = 0;
    while began.elapsed() < longest {
        if Socket::new(to, &Plan::default()).connect(to) == 0 {
            return json!({"elapsed_us": began.elapsed().as_micros() as u64, "refused": refused});
        }
        refused += 1;
        std::thread::sleep(Duration::from_millis(2));
    }
    json!({"elapsed_us": null, "refused": refused})
}
