from treering.data import DATA_VARIABLE, data_folder


def test_the_variable_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert data_folder() == tmp_path


def test_without_the_variable_it_is_the_shared_folder_next_to_the_current_one(tmp_path, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert data_folder() is None
    (tmp_path / "shared" / "data").mkdir(parents=True)
    folder = data_folder()
    assert folder is not None
    assert folder.resolve() == (tmp_path / "shared" / "data").resolve()
