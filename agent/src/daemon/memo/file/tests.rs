use proptest::prelude::*;

use super::*;

fn full() -> Document {
    let breaker = Breaker {
        state: State::Open,
        since_ns: 1,
        reason: Reason {
            window: Window::Connects,
            kind: ReasonKind::FailureRate,
            value: 0.6,
            threshold: 0.5,
        },
        bypassed: None,
        generation: 3,
        until_ns: u64::MAX,
        cooldown_ns: 60_000_000_000,
        healthy_since_ns: 0,
        misled: 2,
        distrust_until_ns: 7,
        outage_since_ns: 1,
        floor_seqs: [4, 5],
        floor_at_ns: 6,
        broken_after_ns: Some(8),
    };
    let calls = Calls {
        last: 9,
        entries: vec![u32::MAX; 3],
    };
    let kept = Kept {
        destination: "10.0.0.5:5432".to_owned(),
        workload: "system.slice/billing.service".to_owned(),
        netns: 4_026_531_840,
        netns_cookie: 1,
        pid: 7,
        calls: [calls, Calls::default()],
        breaker,
    };
    let manual = Manual {
        destination: "[::1]:80".to_owned(),
        workload: None,
        trip: true,
        since: Timestamp::from_unix_ms(1),
        until: Timestamp::from_unix_ms(2),
        by: "uid 0, pid 3".to_owned(),
    };
    let name = Name {
        name: "db.internal".to_owned(),
        address: [10, 0, 0, 5].into(),
        netns_cookie: 1,
        asked: true,
        since_ns: 1,
        seen_ns: 2,
        until_ns: 4,
        newest_ns: 3,
    };
    Document {
        breakers: vec![kept],
        manual: vec![manual],
        names: vec![name],
        ..Document::new(Nanos(5))
    }
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(dir.path());
    assert_eq!(read(&path).unwrap(), None);
    for document in [full(), Document::new(Nanos(6)), full()] {
        write(&path, &document).unwrap();
        assert_eq!(read(&path).unwrap(), Some(document));
    }
    // Nothing else is left lying about.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(is_of_this_boot(&full().boot));
    assert!(!is_of_this_boot(""));
}

#[test]
fn words_of_the_core_survive() {
    let breaker = full().breakers[0].breaker;
    assert_eq!(Breaker::from(&Saved::from(&breaker)), breaker);
}

#[test]
fn names_survive_if_they_are_names() {
    let mut name = full().names.remove(0);
    for address in ["10.0.0.5", "2001:db8::1"] {
        name.address = address.parse().unwrap();
        assert_eq!(Name::from(&name.told().unwrap()), name);
    }
    for bad in ["", "10.0.0.1", "a b", "a\u{1b}[31m.internal"] {
        name.name = bad.to_owned();
        assert_eq!(name.told(), None, "{bad:?}");
    }
}

#[test]
fn what_is_not_ours_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(dir.path());
    let good = serde_json::to_string(&full()).unwrap();
    let bad = [
        String::new(),
        "{half".to_owned(),
        "[]".to_owned(),
        "{\"version\":3}".to_owned(),
        good.replace("\"version\":3", "\"version\":4"),
        good.replace("\"version\":3", "\"version\":0"),
        good.replace("\"seen_ns\":2", "\"seen_ns\":-2"),
        good.replace("\"10.0.0.5\"", "\"10.0.0\""),
        good.replace("\"pid\":7", "\"pid\":-7"),
        good.replace("\"pid\":7", "\"pid\":7,\"more\":1"),
        good[..good.len() - 1].to_owned(),
        format!("{good}{good}"),
        " ".repeat(LARGEST as usize + 1),
    ];
    for text in bad {
        fs::write(&path, &text).unwrap();
        assert_eq!(read(&path).unwrap(), None, "{:.80}", text);
        assert!(!path.exists());
        let aside = path.with_extension("json.damaged");
        assert_eq!(fs::read(&aside).unwrap(), text.as_bytes());
    }
}

/// An upgrade, also one by takeover.
#[test]
fn the_form_before_is_read() {
    let mut document = full();
    document.names.clear();
    for version in OLDEST..VERSION {
        document.version = version;
        let mut old = serde_json::to_string(&document).unwrap();
        old = old.replace(",\"names\":[]", "");
        if version == 1 {
            old = old.replace("\"bypassed\":null,", "");
        }
        assert_eq!(old.contains("bypassed"), version > 1, "{old}");
        assert!(!old.contains("names"), "{old}");
        let read = parse(old.as_bytes()).unwrap();
        assert!(read == document && read.is_known());
        assert_eq!(read.names(), [] as [Arc<str>; 0]);
    }
    document.manual[0].destination = "db.internal:5432".to_owned();
    assert_eq!(document.names(), ["db.internal".into()]);
}

#[test]
fn names_lie_in_a_file_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let now = Nanos::from_secs(10_000);
    let both = |now| read_both(dir.path(), now).unwrap();
    assert_eq!(both(now), None);
    let mut names = Document::new(now);
    names.names = full().names;
    names.names[0].until_ns = (now + TOO_OLD).0;
    write(&names_path(dir.path()), &names).unwrap();
    assert_eq!(both(now), Some(names.clone()));
    let state = Document {
        names: Vec::new(),
        ..full()
    };
    write(&path(dir.path()), &state).unwrap();
    let read = both(now).unwrap();
    assert_eq!(
        (&read.breakers, &read.names),
        (&state.breakers, &names.names)
    );
    // Nobody has listened for too long: only what still holds is believed.
    let late = now + TOO_OLD;
    assert_eq!(both(late).unwrap().names.len(), 1);
    let later = late + Nanos::from_secs(1);
    assert_eq!(both(later).unwrap().names.len(), 0);
    // The machine was started anew.
    names.boot = "another".to_owned();
    write(&names_path(dir.path()), &names).unwrap();
    let read = both(now).unwrap();
    assert_eq!((read.breakers.len(), read.names.len()), (1, 0));
    // A damaged one takes the other file with it no more than the other way round.
    fs::write(names_path(dir.path()), "{").unwrap();
    assert_eq!(both(now).unwrap().breakers.len(), 1);
    assert!(dir.path().join("names.json.damaged").exists());
}

#[test]
fn a_write_that_fails_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(dir.path());
    let document = full();
    write(&path, &document).unwrap();
    // The name for the fresh one is taken by a directory.
    fs::create_dir(path.with_extension("json.new")).unwrap();
    assert!(write(&path, &Document::new(Nanos(1))).is_err());
    assert_eq!(read(&path).unwrap(), Some(document));
}

#[test]
fn the_largest_is_within_the_bound() {
    let mut document = full();
    let kept = &mut document.breakers[0];
    for calls in &mut kept.calls {
        calls.last = u64::MAX;
        calls.entries = vec![u32::MAX; agent_common::window::SLOTS];
    }
    // A path may have 4,095 bytes; most have far less than the 512 that are reckoned with here.
    kept.workload = "w".repeat(512);
    let one = serde_json::to_vec(&document.breakers).unwrap().len() as u64;
    let name = &mut document.names[0];
    *name = Name {
        netns_cookie: u64::MAX,
        since_ns: u64::MAX,
        seen_ns: u64::MAX,
        until_ns: u64::MAX,
        newest_ns: u64::MAX,
        ..name.clone()
    };
    // A name may have 253 bytes; most have far less than the 128 that are reckoned with here.
    name.name = "n".repeat(128);
    let name = serde_json::to_vec(&document.names).unwrap().len() as u64;
    let all = one * MOST_BREAKERS as u64 + name * crate::hosts::table::MOST as u64;
    assert!(all <= LARGEST, "{one}, {name}");
}

proptest! {
    #[test]
    fn bytes_of_any_kind_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
    }
}
