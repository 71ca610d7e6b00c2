//! `explain`: finds out whose workload is meant, asks the agent, shows the answer.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use super::{ExplainArgs, Failure, explain_text, manual::with_query, output::Output, table::Style};
use crate::{
    control::{
        api::{Explanation, Timestamp, parse_destination},
        client::Client,
    },
    kernel::cgroup,
};

/// Explains one destination.
pub async fn explain(
    client: &Client,
    args: &ExplainArgs,
    out: &mut Output<'_>,
) -> Result<(), Failure> {
    parse_destination(&args.destination).map_err(Failure::Usage)?;
    let workload = workload(args)?;
    let query = [
        ("destination", Some(args.destination.as_str())),
        ("workload", workload.as_deref()),
    ];
    let body = client
        .get(&with_query("/v1/explain".to_owned(), &query))
        .await?;
    if args.json {
        // As it came: keys of a newer agent are not lost.
        out.write_all(&body)?;
        writeln!(out)?;
        return Ok(());
    }
    let explanation: Explanation = serde_json::from_slice(&body)?;
    let style = Style {
        colour: out.colour,
        width: out.width,
        now: Timestamp::now(),
    };
    out.write_all(explain_text::text(&explanation, style).as_bytes())?;
    Ok(())
}

/// Whom the caller means. Resolved here and not by the agent: a process id, and a path, are those
/// of the shell that they were typed into, and the agent may live in a container.
fn workload(args: &ExplainArgs) -> Result<Option<String>, Failure> {
    let mount = || {
        cgroup::mount_point().map_err(|error| {
            Failure::Said(format!(
                "finding the control groups of this machine: {error}"
            ))
        })
    };
    match (args.pid, &args.cgroup) {
        (Some(pid), _) => cgroup::of_process(&mount()?, pid)
            .map(Some)
            .map_err(|error| Failure::Said(format!("--pid: {error}"))),
        (None, Some(path)) => of_path(&mount()?, path).map(Some),
        (None, None) => Ok(None),
    }
}

fn of_path(mount: &Path, path: &Path) -> Result<String, Failure> {
    let said = |what: &str| Failure::Said(format!("--cgroup {}: {what}", path.display()));
    // A path that is not absolute is one in this directory, or a workload as `status` shows it.
    // The root's workload is "/".
    let candidates: [PathBuf; 2] = match path.to_str() {
        Some("/") => [mount.to_owned(), mount.to_owned()],
        _ => [path.to_owned(), mount.join(path)],
    };
    let found: Vec<PathBuf> = candidates
        .into_iter()
        .filter_map(|path| path.canonicalize().ok())
        .filter(|path| path.is_dir())
        .collect();
    let Some(first) = found.first() else {
        return Err(said("there is no such control group"));
    };
    match found.iter().find(|path| path.starts_with(mount)) {
        Some(path) => Ok(cgroup::relative(mount, path)),
        None => Err(said(&format!(
            "{} is not below {}, where the control groups are",
            first.display(),
            mount.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_groups_by_directory_or_as_status_shows_them() {
        let tree = tempfile::tempdir().unwrap();
        let mount = tree.path().canonicalize().unwrap();
        std::fs::create_dir_all(mount.join("a.slice/b")).unwrap();
        std::fs::write(mount.join("file"), "").unwrap();
        let name = |path: &Path| of_path(&mount, path).map_err(|e| (e.exit_code(), e.to_string()));
        assert_eq!(name(Path::new("a.slice/b")).unwrap(), "a.slice/b");
        assert_eq!(name(&mount.join("a.slice/./b/")).unwrap(), "a.slice/b");
        assert_eq!(name(Path::new("/")).unwrap(), "/");
        for (bad, why) in [
            ("a.slice/c", "no such control group"),
            ("file", "no such control group"),
            ("/proc", "is not below"),
        ] {
            let (code, message) = name(Path::new(bad)).unwrap_err();
            assert!(code == 1 && message.contains(why), "{bad}: {message}");
        }
    }
}
