from cutekernels.db.questions.reader import Winner as Winner
from cutekernels.db.questions.reader import open as open
from cutekernels.db.storage.engine import url_of as url_of
