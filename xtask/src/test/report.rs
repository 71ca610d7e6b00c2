//! Counts and skips, read from what libtest prints.

use std::fmt;

/// What a test prints when it leaves itself out: `SKIP name: reason`.
const SKIP: &str = "SKIP ";

/// What libtest has printed before that on the same line, where tests run one at a time.
const RUNNING: &str = " ... ";

/// The sum over all test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Tests that ran and passed.
    pub passed: usize,
    /// Tests that failed.
    pub failed: usize,
    /// `name: reason` of each test that left itself out or is ignored.
    pub skips: Vec<String>,
}

impl Report {
    /// How many tests there were.
    pub fn total(&self) -> usize {
        self.passed + self.failed + self.skips.len()
    }

    /// Begins to read the output of one more program.
    pub fn start(&mut self) -> View<'_> {
        View {
            report: self,
            hidden: false,
            skipped: 0,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out)?;
        for skip in &self.skips {
            writeln!(out, "skipped {skip}")?;
        }
        let Self {
            passed,
            failed,
            skips,
        } = self;
        writeln!(
            out,
            "{passed} passed, {failed} failed, {} skipped",
            skips.len()
        )
    }
}

/// Reads one program's output line by line.
#[derive(Debug)]
pub struct View<'a> {
    report: &'a mut Report,
    /// Inside the section with the output of tests that passed.
    hidden: bool,
    /// Tests of the current result that passed only because they left themselves out.
    skipped: usize,
}

impl View<'_> {
    /// Takes in a line; says whether it is worth showing.
    pub fn line(&mut self, line: &str) -> bool {
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.result(rest);
            self.hidden = false;
            return true;
        }
        if let Some(skip) = skip(line) {
            // A test may say so more than once, for instance once for each program it tries.
            if !self.report.skips.iter().any(|known| known == skip) {
                self.report.skips.push(skip.to_owned());
                self.skipped += 1;
            }
            return false;
        }
        if let Some((name, reason)) = ignored(line) {
            self.report.skips.push(format!("{name}: {reason}"));
        }
        match line {
            "successes:" => self.hidden = true,
            "failures:" => self.hidden = false,
            _ => {}
        }
        !self.hidden
    }

    fn result(&mut self, rest: &str) {
        let count = |what: &str| {
            let mut parts = rest.split(['.', ';']).map(str::trim);
            parts.find_map(|part| part.strip_suffix(what)?.trim().parse::<usize>().ok())
        };
        self.report.passed += count("passed").unwrap_or(0).saturating_sub(self.skipped);
        self.report.failed += count("failed").unwrap_or(0);
        self.skipped = 0;
    }
}

/// Reads `SKIP name: reason`, at the start or after `test name ... `.
fn skip(line: &str) -> Option<&str> {
    line.strip_prefix(SKIP).or_else(|| {
        let (_, rest) = line.strip_prefix("test ")?.split_once(RUNNING)?;
        rest.strip_prefix(SKIP)
    })
}

/// Reads `test name ... ignored, reason`.
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (name, outcome) = line.strip_prefix("test ")?.rsplit_once(" ... ignored")?;
    Some((
        name,
        outcome.strip_prefix(", ").unwrap_or("marked as ignored"),
    ))
}

#[cfg(test)]
mod tests {
    use super::Report;

    const OUTPUT: &str = "\nrunning 4 tests\ntest a ... ok\ntest b ... ok\n\
        test c ... ignored, takes an hour\ntest d ... FAILED\n\nsuccesses:\n\n---- b stdout ----\n\
        SKIP b: no netem in this kernel\nnoise\n\nsuccesses:\n    a\n    b\n\nfailures:\n\n\
        ---- d stdout ----\npanicked\n\nfailures:\n    d\n\n\
        test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";

    fn read(report: &mut Report, output: &str) -> Vec<String> {
        let mut view = report.start();
        output
            .lines()
            .filter(|line| view.line(line))
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn counts_are_summed_and_skips_are_no_passes() {
        let mut report = Report::default();
        read(&mut report, OUTPUT);
        read(
            &mut report,
            "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out",
        );
        assert_eq!((report.passed, report.failed), (6, 1));
        assert_eq!(
            report.skips,
            ["c: takes an hour", "b: no netem in this kernel"]
        );
        assert_eq!(report.total(), 9);
        assert!(
            report
                .to_string()
                .ends_with("6 passed, 1 failed, 2 skipped\n")
        );
    }

    #[test]
    fn output_of_passing_tests_is_hidden_and_of_failing_ones_shown() {
        let shown = read(&mut Report::default(), OUTPUT);
        assert!(shown.iter().any(|line| line == "panicked"));
        assert!(!shown.iter().any(|line| line == "noise"));
        assert!(
            shown
                .last()
                .is_some_and(|line| line.starts_with("test result"))
        );
    }

    #[test]
    fn a_skip_is_found_behind_the_test_that_runs() {
        let mut report = Report::default();
        read(
            &mut report,
            "test a ... SKIP a: x\nok\ntest result: ok. 1 passed; 0 failed\n",
        );
        assert_eq!((report.passed, report.skips), (0, vec!["a: x".to_owned()]));
    }

    #[test]
    fn a_skip_said_twice_counts_once() {
        let mut report = Report::default();
        read(
            &mut report,
            "SKIP a: x\nSKIP a: x\ntest result: ok. 1 passed; 0 failed\n",
        );
        assert_eq!((report.passed, report.skips.len()), (0, 1));
    }
}
