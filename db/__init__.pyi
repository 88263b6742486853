from cutekernels.db.reader import open as open
