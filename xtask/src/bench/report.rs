//! Figures and how they are printed.

use std::fmt::Write as _;

use serde_json::{Value, json};

/// What a figure should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
}

impl Target {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
        }
    }

    const fn limit(self) -> f64 {
        match self {
            Self::AtMost(limit) | Self::AtLeast(limit) => limit,
        }
    }

    const fn sign(self) -> &'static str {
        match self {
            Self::AtMost(_) => "<=",
            Self::AtLeast(_) => ">=",
        }
    }
}

/// One measured number.
#[derive(Clone, Debug)]
pub struct Figure {
    what: String,
    value: f64,
    unit: &'static str,
    target: Option<Target>,
    control: Option<f64>,
    note: String,
}

impl Figure {
    /// A number with its unit.
    pub fn new(what: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            what: what.into(),
            value,
            unit,
            target: None,
            control: None,
            note: String::new(),
        }
    }

    /// With a target.
    pub fn target(mut self, target: Target) -> Self {
        self.target = Some(target);
        self
    }

    /// With the A/A ratio, measured in the same way between two that should be equal.
    pub fn control(mut self, ratio: f64) -> Self {
        self.control = Some(ratio);
        self
    }

    /// With what a reader has to know.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    fn verdict(&self) -> &'static str {
        match self.target {
            Some(target) if target.is_met(self.value) => "ok",
            Some(_) => "over",
            None => "",
        }
    }
}

/// All figures, by part.
#[derive(Debug, Default)]
pub struct Report {
    parts: Vec<(String, Vec<Figure>)>,
}

impl Report {
    /// Adds the figures of a part.
    pub fn add(&mut self, part: &str, figures: Vec<Figure>) {
        self.parts.push((part.to_owned(), figures));
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// How many figures miss their target.
    pub fn missed(&self) -> usize {
        let figures = self.parts.iter().flat_map(|(_, figures)| figures);
        figures.filter(|figure| figure.verdict() == "over").count()
    }

    /// One line a figure, under the name of its part.
    pub fn table(&self) -> String {
        let mut rows = vec![["", "measured", "target", "", "A/A", "note"].map(str::to_owned)];
        for (part, figures) in &self.parts {
            let mut heading: [String; 6] = Default::default();
            heading[0].clone_from(part);
            rows.push(heading);
            for figure in figures {
                rows.push([
                    format!("  {}", figure.what),
                    measured(figure.value, figure.unit),
                    figure.target.map_or_else(String::new, |target| {
                        format!("{} {}", target.sign(), number(target.limit()))
                    }),
                    figure.verdict().to_owned(),
                    figure.control.map_or_else(String::new, number),
                    figure.note.clone(),
                ]);
            }
        }
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
        let widths: Vec<usize> = (0..5).map(|column| width(column).unwrap_or(0)).collect();
        let mut text = String::new();
        for [what, value, target, verdict, control, note] in &rows {
            let line = format!(
                "{what:<0$}  {value:>1$}  {target:<2$}  {verdict:<3$}  {control:>4$}  {note}",
                widths[0], widths[1], widths[2], widths[3], widths[4],
            );
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }

    /// The same as one JSON object.
    pub fn json(&self) -> Value {
        let figures: Vec<Value> = self
            .parts
            .iter()
            .flat_map(|(part, figures)| figures.iter().map(move |figure| (part, figure)))
            .map(|(part, figure)| {
                json!({
                    "part": part,
                    "what": figure.what,
                    "value": figure.value,
                    "unit": figure.unit,
                    "target": figure.target.map(Target::limit),
                    "compare": figure.target.map(Target::sign),
                    "met": figure.target.map(|target| target.is_met(figure.value)),
                    "control": figure.control,
                    "note": figure.note,
                })
            })
            .collect();
        json!({ "figures": figures, "missed": self.missed() })
    }
}

/// Three digits or so: more would be noise.
fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 100.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 0.1 || size == 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

fn measured(value: f64, unit: &str) -> String {
    match unit {
        "x" => format!("{value:.3}x"),
        "" => number(value),
        _ => format!("{} {unit}", number(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::default();
        report.add(
            "connect",
            vec![
                Figure::new("connect and close", 1.0789, "x")
                    .target(Target::AtMost(1.10))
                    .control(1.002),
                Figure::new("throughput", 0.9, "x").target(Target::AtLeast(0.97)),
                Figure::new("without", 15.26, "us").note("a note"),
            ],
        );
        report
    }

    #[test]
    fn the_table_reads_well() {
        let want = [
            "                     measured  target          A/A  note",
            "connect",
            "  connect and close    1.079x  <= 1.10  ok    1.00",
            "  throughput           0.900x  >= 0.97  over",
            "  without             15.3 us                       a note",
            "",
        ]
        .join("\n");
        assert_eq!(report().table(), want);
    }

    #[test]
    fn json_holds_the_same() {
        let json = report().json();
        assert_eq!(json["missed"], 1);
        assert_eq!(json["figures"][0]["met"], true);
        assert_eq!(json["figures"][1]["met"], false);
        assert_eq!(json["figures"][1]["compare"], ">=");
        assert_eq!(json["figures"][2]["met"], Value::Null);
    }
}
