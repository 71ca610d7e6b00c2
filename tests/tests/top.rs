//! `backstop top`: on a terminal, and elsewhere.

use std::net::SocketAddr;

use rustix::process::Signal;
use tests::{
    agent::{Agent, AgentOptions, binary},
    cgroup::TestCgroup,
    dialer::Dialer,
    net::Namespace,
    process::Program,
    terminal::Terminal,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const DESTINATION: &str = "127.0.0.1:8080";
/// The screen that the program has left, and the one that was before it.
const ENTERED: &str = "\x1b[?1049h";
const LEFT: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

fn start(agent: &Agent, size: (u16, u16)) -> Terminal {
    let socket = agent.home().socket();
    let socket = socket.to_str().expect("ASCII");
    Terminal::start(binary(), &["--socket", socket, "top"], size)
}

fn has(screen: &[String], text: &str) -> bool {
    screen.iter().any(|line| line.contains(text))
}

/// Connects that fail, so that there is a row, and a breaker that opens.
fn fail(dialer: &mut Dialer, times: u32) {
    let to: SocketAddr = DESTINATION.parse().expect("an address");
    for _ in 0..times {
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
}

#[test]
fn it_shows_what_happens_and_gives_the_terminal_back() {
    let (group, namespace) = (TestCgroup::new("top"), Namespace::new("top"));
    let agent = Agent::start_for_loops(&group, "[defaults.breaker]\nredial = false\n");
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    fail(&mut dialer, 1);
    let mut terminal = start(&agent, (120, 30));
    let screen = terminal.wait_screen("the row", |screen| has(screen, DESTINATION));
    assert!(screen[0].starts_with("backstop "), "{screen:#?}");
    assert!(
        has(&screen, "ATT/s") && has(&screen, &group.workload()),
        "{screen:#?}"
    );
    assert!(!terminal.is_as_before(), "keys are not shown");
    // It goes on by itself.
    fail(&mut dialer, 5);
    terminal.wait_screen("the breaker to open", |screen| has(screen, "  open "));
    terminal.type_in("xq");
    let (status, all) = terminal.wait(LEFT);
    assert!(status.success(), "{status}: {all:?}");
    assert!(all.starts_with(ENTERED), "{all:?}");
    assert!(terminal.is_as_before());
}

/// However it is ended.
#[test]
fn every_end_gives_the_terminal_back() {
    let group = TestCgroup::new("top-ends");
    let agent = Agent::start(&group, "");
    type End = fn(&mut Terminal);
    let ends: [End; 4] = [
        |terminal| terminal.type_in("\x03"),
        |terminal| terminal.signal(Signal::TERM),
        |terminal| terminal.signal(Signal::INT),
        |terminal| terminal.signal(Signal::HUP),
    ];
    for (at, end) in ends.into_iter().enumerate() {
        let mut terminal = start(&agent, (80, 24));
        terminal.wait_screen("a screen", |screen| has(screen, "No destination seen yet"));
        end(&mut terminal);
        let (status, all) = terminal.wait(LEFT);
        assert!(status.success(), "{at}: {status}: {all:?}");
        assert!(terminal.is_as_before(), "{at}");
    }
}

#[test]
fn it_fits_into_the_terminal_as_that_changes() {
    let (group, namespace) = (TestCgroup::new("top-size"), Namespace::new("top-size"));
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    for port in 9001..9021 {
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    let terminal = start(&agent, (120, 40));
    let fits = |screen: &[String], columns: usize, lines: usize| {
        screen.len() <= lines && screen.iter().all(|line| line.chars().count() <= columns)
    };
    let screen = terminal.wait_screen("every row", |screen| has(screen, ":9020"));
    assert!(fits(&screen, 120, 40), "{screen:#?}");
    terminal.resize(50, 10);
    let screen = terminal.wait_screen("fewer rows", |screen| has(screen, "and 14 more"));
    assert!(fits(&screen, 50, 10), "{screen:#?}");
    terminal.resize(120, 40);
    terminal.wait_screen("every row again", |screen| {
        has(screen, ":9020") && !has(screen, " more")
    });
}

#[test]
fn an_agent_that_goes_away_and_returns() {
    let group = TestCgroup::new("top-away");
    let options = AgentOptions::new(&group);
    let agent = options.start();
    let terminal = start(&agent, (120, 30));
    terminal.wait_screen("a screen", |screen| has(screen, "No destination seen yet"));
    assert_eq!(agent.stop().code(), 0);
    let screen = terminal.wait_screen("that it is away", |screen| has(screen, "no agent answers"));
    assert!(
        has(&screen, "backstop 0"),
        "what it said last stays: {screen:#?}"
    );
    let _agent = options.start();
    terminal.wait_screen("that it is back", |screen| {
        has(screen, "No destination seen yet") && !has(screen, "no agent answers")
    });
}

/// Into a pipe or a file: one table, with the rates of a second, and the end.
#[test]
fn elsewhere_it_prints_one_table() {
    let (group, namespace) = (TestCgroup::new("top-pipe"), Namespace::new("top-pipe"));
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    fail(&mut dialer, 1);
    let text = agent.command(&["top"]).good();
    let titles = text
        .lines()
        .filter(|line| line.starts_with("DESTINATION"))
        .count();
    assert_eq!(titles, 1, "{text}");
    let row = text
        .lines()
        .find(|line| line.starts_with(DESTINATION))
        .expect("the row");
    let words: Vec<_> = row.split_whitespace().collect();
    assert_eq!(
        words[4..7],
        ["0", "0", "0"],
        "nothing happened in that second: {text}"
    );
    assert!(!text.contains('\x1b'), "{text:?}");
    // No agent at all is an error, as everywhere.
    let none = tempfile::tempdir()
        .expect("a directory")
        .path()
        .join("none");
    let ended = Program::new(binary())
        .arg("--socket")
        .arg(none)
        .arg("top")
        .run();
    assert_eq!((ended.code(), ended.stdout.as_str()), (3, ""), "{ended}");
}
