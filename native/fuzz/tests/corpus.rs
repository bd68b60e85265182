//! The kept corpus, replayed in every test run without a fuzzer.

use std::path::Path;

#[test]
fn nothing_in_the_corpus_hurts() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, run) in headrace_fuzz::TARGETS {
        let mut inputs = 0;
        let folder = corpus.join(name);
        for entry in
            std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            println!("{}", path.display());
            run(&bytes);
            inputs += 1;
        }
        assert!(inputs > 0, "{name} has no corpus");
    }
}
