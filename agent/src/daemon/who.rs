//! Who is at the other end of the control socket, in words.

use std::fs;

use crate::control::api::Peer;

/// What `loginuid` is without a login.
const NO_LOGIN: u32 = u32::MAX;

/// The peer as the kernel vouches for it, with what `/proc` says of its process, which waits for an
/// answer: `uid 0 (login 1000), pid 4711 (backstop, from bash 4700)`. A command is gone in a moment; who
/// started it may still be there, and tells a person from a script. Whoever has gone already is uid and
/// pid.
pub fn is(peer: Peer) -> String {
    let Some(pid) = peer.pid else {
        return peer.to_string();
    };
    let login = read(pid, "loginuid").and_then(|text| text.trim().parse::<u32>().ok());
    let login = match login.filter(|login| *login != NO_LOGIN && *login != peer.uid) {
        Some(login) => format!(" (login {login})"),
        None => String::new(),
    };
    let from = parent(pid).and_then(|parent| Some(format!(", from {} {parent}", comm(parent)?)));
    let process = match comm(pid) {
        Some(comm) => format!(" ({comm}{})", from.unwrap_or_default()),
        None => String::new(),
    };
    format!("uid {}{login}, pid {pid}{process}", peer.uid)
}

fn comm(pid: i32) -> Option<String> {
    let comm = read(pid, "comm")?;
    let comm = comm.strip_suffix('\n').unwrap_or(&comm);
    // A program chooses it.
    let shown = |c: char| if c.is_control() { '?' } else { c };
    Some(comm.chars().map(shown).collect())
}

/// The process that started it; `None`: it is not to be seen from here.
fn parent(pid: i32) -> Option<i32> {
    let status = read(pid, "status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok().filter(|parent| *parent > 0)
}

fn read(pid: i32, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_and_who_started_it() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let peer = Peer {
            uid: 0,
            pid: Some(pid),
        };
        let own = i32::try_from(std::process::id()).unwrap();
        // Until it is `sleep` it has our name.
        let said = is(peer);
        assert!(said.starts_with("uid 0"), "{said}");
        assert!(said.contains(&format!("pid {pid} (")), "{said}");
        let from = format!(", from {} {own})", comm(own).unwrap());
        assert!(said.ends_with(&from), "{said}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(is(peer), peer.to_string(), "it has gone");
        let nobody = Peer { uid: 7, pid: None };
        assert_eq!(is(nobody), "uid 7");
    }
}
